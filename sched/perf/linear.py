"""FairBatching's step-time model T = a + b*new tokens + c*context, recalibrated online (section 3.3)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..api.errors import InvalidValue
from ..api.perf import Array, Load
from .fit import proportional
from .model import whole_steps
from .online import STEP, running_rate
from .recursive import Recursive

SCALE = np.array([1.0, 1e3, 1e5])  # brings tokens and contexts near 1, for conditioning
FORGETTING = 0.99  # per step: the weight of a step halves after 69 others
KNOWN = 20  # steps after which a single step is clipped; also the weight of an offline fit


@dataclass(frozen=True, slots=True)
class LinearForm:
    """T = a + b*(new tokens) + c*(tokens of context that new ones attend to). A `Form`."""

    a: float
    b: float
    c: float

    def step_time(self, load: Load) -> float:
        return self.a + self.b * load.tokens + self.c * (load.context + load.prefix)

    def decode_times(self, rows: Array, longest: Array, context: Array) -> Array:
        return self.a + self.b * np.asarray(rows, dtype=float) + self.c * np.asarray(context, dtype=float)

    def prefill_times(self, tokens: Array, context: Array, chunk: int) -> Array:
        full, last = whole_steps(tokens, chunk)
        steps = full + (last > 0)
        result: Array = steps * (self.a + self.c * (context + chunk * (steps - 1.0) / 2)) + self.b * tokens
        return result


class LinearModel:
    """A `LinearForm` that is recalibrated online. A `PerfModel`.

    The three coefficients are corrected at each step by least squares of the relative error with
    forgetting (see `Recursive`). After KNOWN steps, a step counts as at most twice as fast or slow as
    predicted. Writer: the Scheduler that observes steps.
    """

    def __init__(
        self,
        a: float,
        b: float,
        c: float,
        *,
        forgetting: float = FORGETTING,
        learn: bool = True,
        prefill_rate: float | None = None,
    ) -> None:
        for name, value in (("a", a), ("b", b), ("c", c)):
            if not 0 <= value < float("inf"):
                raise InvalidValue(f"{name}={value!r} must be 0 or more seconds", name)
        if not 0.5 <= forgetting <= 1:
            raise InvalidValue(f"{forgetting=} must be between 0.5 and 1", "forgetting")
        self._learning = Recursive(np.array([a, b, c]) * SCALE, forgetting)
        self._known = 0
        self.version = 0
        self._learn = learn
        chunk = a + 8192 * b
        self._prefill_rate = prefill_rate or (8192 / chunk if chunk > 0 else float("inf"))

    @classmethod
    def fitted(
        cls, measured: Iterable[tuple[Load, float]], *, forgetting: float = FORGETTING, learn: bool = True
    ) -> LinearModel:
        """Fit a model offline by least squares (`fit.proportional`). Raises InvalidValue without steps."""
        steps = [(load, seconds) for load, seconds in measured if seconds > 0]
        if not steps:
            raise InvalidValue("no measured steps to fit", "measured")
        table = np.array([_row(load) for load, _ in steps])
        seconds = np.array([time for _, time in steps])
        a, b, c = (proportional(table, seconds) / SCALE).tolist()
        model = cls(a, b, c, forgetting=forgetting, learn=learn)
        predicted = table @ model._learning.weights
        model._learning.know(table / predicted[:, None] * np.sqrt(min(1.0, KNOWN / len(steps))))
        model._known = min(KNOWN, len(steps))
        return model

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """(a, b, c): seconds, seconds per new token, seconds per token of context."""
        a, b, c = (self._learning.weights / SCALE).tolist()
        return a, b, c

    @property
    def form(self) -> LinearForm:
        """The coefficients as learned so far."""
        return LinearForm(*self.coefficients)

    @property
    def prefill_rate(self) -> float:
        return self._prefill_rate

    def step_time(self, load: Load) -> float:
        return self.form.step_time(load)

    def decode_times(self, rows: Array, longest: Array, context: Array) -> Array:
        return self.form.decode_times(rows, longest, context)

    def prefill_times(self, tokens: Array, context: Array, chunk: int) -> Array:
        return self.form.prefill_times(tokens, context, chunk)

    def observe(self, load: Load, seconds: float) -> None:
        if not 0 < seconds < float("inf"):
            return
        self.version += 1
        if load.prefill and not load.decode:
            self._prefill_rate = running_rate(self._prefill_rate, load.prefill, seconds)
        if self._learn:
            self._learnt(load, seconds)

    def _learnt(self, load: Load, seconds: float) -> None:
        """Learn from one more step.

        Errors are relative to the prediction. Relative to the measurement, slow steps would count less than
        fast ones, and predictions would be too short if times are noisy.
        """
        scale, predicted = seconds, self.step_time(load)
        if self._known >= KNOWN and predicted > 0:
            scale, seconds = predicted, min(max(seconds, predicted / STEP), predicted * STEP)
        self._known += 1
        self._learning.update(np.array(_row(load)) / scale, seconds / scale)


def _row(load: Load) -> tuple[float, float, float]:
    return 1.0, load.tokens / SCALE[1], (load.context + load.prefix) / SCALE[2]
