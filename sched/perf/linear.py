"""FairBatching's step-time model T = a + b*new tokens + c*context, recalibrated while it serves (section 3.3)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..errors import InvalidValue
from .fit import nonnegative
from .model import Array, Load, whole_steps
from .online import running_rate

SCALE = np.array([1.0, 1e3, 1e5])  # tokens and contexts brought near 1, so that the filter is well conditioned
PRIOR = 1.0  # variance of a coefficient (in scaled seconds) before anything is measured
LIMIT = 1e3  # most variance: with forgetting and a load that never varies it would grow without end


class LinearModel:
    """T = a + b*(new tokens) + c*(tokens of context that new ones attend to). A PerfModel.

    Recursive least squares with forgetting corrects the three coefficients at each step; none is ever negative. A
    load that never varies moves their sum only, and keeps its variance bounded. Writer: the Scheduler that observes.
    """

    def __init__(
        self,
        a: float,
        b: float,
        c: float,
        *,
        forgetting: float = 0.998,
        learn: bool = True,
        prefill_rate: float | None = None,
    ) -> None:
        for name, value in (("a", a), ("b", b), ("c", c)):
            if not 0 <= value < float("inf"):
                raise InvalidValue(f"{name}={value!r} must be 0 or more seconds", name)
        if not 0.5 <= forgetting <= 1:
            raise InvalidValue(f"{forgetting=} must be between 0.5 and 1", "forgetting")
        self._weights = np.array([a, b, c]) * SCALE
        self._variance = np.eye(3) * PRIOR
        self._forgetting = forgetting
        self._learn = learn
        chunk = a + 8192 * b
        self._prefill_rate = prefill_rate or (8192 / chunk if chunk > 0 else float("inf"))

    @classmethod
    def fitted(
        cls, measured: Iterable[tuple[Load, float]], *, forgetting: float = 0.998, learn: bool = True
    ) -> LinearModel:
        """Fitted offline by least squares of the relative error. Raises InvalidValue without data."""
        steps = [(load, seconds) for load, seconds in measured if seconds > 0]
        if not steps:
            raise InvalidValue("no measured steps to fit", "measured")
        table = np.array([_row(load) for load, _ in steps])
        seconds = np.array([time for _, time in steps])
        a, b, c = (nonnegative(table / seconds[:, None], np.ones(len(steps))) / SCALE).tolist()
        return cls(a, b, c, forgetting=forgetting, learn=learn)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """(a, b, c): seconds, seconds per new token, seconds per token of context."""
        a, b, c = (self._weights / SCALE).tolist()
        return a, b, c

    @property
    def prefill_rate(self) -> float:
        return self._prefill_rate

    def step_time(self, load: Load) -> float:
        a, b, c = self.coefficients
        return a + b * load.tokens + c * (load.context + load.prefix)

    def decode_times(self, rows: Array, longest: Array, context: Array) -> Array:
        a, b, c = self.coefficients
        result: Array = a + b * np.asarray(rows, dtype=float) + c * np.asarray(context, dtype=float)
        return result

    def prefill_times(self, tokens: Array, context: Array, chunk: int) -> Array:
        a, b, c = self.coefficients
        full, last = whole_steps(tokens, chunk)
        steps = full + (last > 0)
        result: Array = steps * (a + c * (context + chunk * (steps - 1.0) / 2)) + b * tokens
        return result

    def observe(self, load: Load, seconds: float) -> None:
        if not 0 < seconds < float("inf"):
            return
        if load.prefill and not load.decode:
            self._prefill_rate = running_rate(self._prefill_rate, load.prefill, seconds)
        if self._learn:
            # relative: a decode step of 10 ms counts as much as a prefill of 400 ms
            self._update(np.array(_row(load)) / seconds, 1.0)

    def _update(self, row: Array, target: float) -> None:
        spread = self._variance @ row
        gain = spread / (self._forgetting + row @ spread)
        self._weights = np.maximum(self._weights + gain * (target - row @ self._weights), 0.0)
        variance = (self._variance - np.outer(gain, spread)) / self._forgetting
        variance = (variance + variance.T) / 2
        largest = float(np.diag(variance).max())
        self._variance = variance * (LIMIT / largest) if largest > LIMIT else variance


def _row(load: Load) -> tuple[float, float, float]:
    return 1.0, load.tokens / SCALE[1], (load.context + load.prefix) / SCALE[2]
