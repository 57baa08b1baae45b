"""The general form of step-time models. Every published model is a special case."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log1p

import numpy as np

from ..api.errors import InvalidValue
from ..api.perf import Array, Form, Load
from .online import Ratio, running_rate


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The coefficients of the general form, in seconds, and its step times. A `Form`.

    T = fixed + w_moe*(1 - (1 - p_moe)^tokens) + prefill*n + decode*d + quadratic*sum(k*c + k^2/2)
        + longest*max(L) + context*(sum(L) - max(L)) + draft*drafts

    for a step with n prompt tokens and d decode tokens, chunks of k new tokens after c, and decode
    contexts L. p_moe is the share of the experts that a token uses.
    """

    fixed: float
    prefill: float
    decode: float
    quadratic: float
    longest: float
    context: float
    w_moe: float = 0.0
    p_moe: float = 0.0
    draft: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not value >= 0:
                raise InvalidValue(f"coefficient {name}={value!r} must be 0 or more seconds", name)
        if self.p_moe > 1:
            raise InvalidValue(f"coefficient p_moe={self.p_moe!r} must be at most 1, a share of experts", "p_moe")

    def step_time(self, load: Load) -> float:
        moe = self.w_moe * (1.0 - (1.0 - self.p_moe) ** load.tokens) if self.w_moe else 0.0
        return (
            self.fixed
            + moe
            + self.prefill * load.prefill
            + self.decode * load.decode
            + self.quadratic * load.quadratic
            + self.longest * load.longest
            + self.context * (load.context - load.longest)
            + self.draft * load.drafts
        )

    def decode_times(self, rows: Array, longest: Array, context: Array) -> Array:
        result: Array = self.fixed + self.decode * rows + self.longest * longest + self.context * (context - longest)
        if self.w_moe:
            result = result + self.w_moe * (1.0 - (1.0 - self.p_moe) ** rows)
        return result

    def prefill_times(self, tokens: Array, context: Array, chunk: int) -> Array:
        """As `Form.prefill_times`.

        The attention of consecutive chunks adds up to that of one long chunk. Only the expert term is
        different for the shorter last step.
        """
        full, last = whole_steps(tokens, chunk)
        times: Array = (full + (last > 0)) * self.fixed + tokens * (
            self.prefill + self.quadratic * (context + 0.5 * tokens)
        )
        if self.w_moe and self.p_moe:
            missed = log1p(-self.p_moe) if self.p_moe < 1 else -1e3  # log probability that a token misses an expert
            times += self.w_moe * (full * (1.0 - exp(missed * chunk)) - np.expm1(missed * last))
        return times


def whole_steps(tokens: Array, chunk: int) -> tuple[Array, Array]:
    """Return the number of full steps of `chunk` tokens, and the tokens left for a shorter one."""
    full: Array = np.floor(tokens * (1.0 / chunk) + 0.5 / chunk)  # add half a token: the product may round down
    last: Array = tokens - full * chunk
    return full, last


class Corrected:
    """A form with fixed coefficients, corrected online by a bounded average of measured/predicted. A `PerfModel`.

    correct: if False, never corrected (the ground truth of a simulation). chunk: tokens of the step that
    the initial prefill rate is computed from.
    """

    def __init__(self, form: Form, *, correct: bool = True, chunk: int = 8192) -> None:
        self._form = form
        self._correct = correct
        self._ratio = Ratio()
        self.version = 0
        first = form.step_time(Load().add_chunk(chunk, 0))
        self._prefill_rate = chunk / first if first > 0 else float("inf")

    @classmethod
    def known(cls, form: Form, ratio: float, prefill_rate: float, version: int) -> Corrected:
        """Create a model with a known correction, which stays as it is."""
        model = cls(form, correct=False)
        model._ratio.value, model._prefill_rate, model.version = ratio, prefill_rate, version
        return model

    @property
    def form(self) -> Form:
        return self._form

    @property
    def ratio(self) -> float:
        """The correction: recent measured/predicted."""
        return self._ratio.value

    @property
    def prefill_rate(self) -> float:
        return self._prefill_rate

    def step_time(self, load: Load) -> float:
        return self._ratio.value * self._form.step_time(load)

    def decode_times(self, rows: Array, longest: Array, context: Array) -> Array:
        return self._ratio.value * self._form.decode_times(rows, longest, context)

    def prefill_times(self, tokens: Array, context: Array, chunk: int) -> Array:
        return self._ratio.value * self._form.prefill_times(tokens, context, chunk)

    def observe(self, load: Load, seconds: float) -> None:
        predicted = self._form.step_time(load)
        if not 0 < seconds < float("inf") or predicted <= 0:
            return
        self.version += 1
        if self._correct:
            self._ratio.observe(predicted, seconds)
        if load.prefill and not load.decode:
            self._prefill_rate = running_rate(self._prefill_rate, load.prefill, seconds)


class GeneralModel(Corrected):
    """The general form, corrected online by one ratio."""

    def __init__(self, coefficients: Coefficients, *, correct: bool = True, chunk: int = 8192) -> None:
        super().__init__(coefficients, correct=correct, chunk=chunk)
        self._coefficients = coefficients

    @property
    def coefficients(self) -> Coefficients:
        return self._coefficients
