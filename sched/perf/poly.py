"""FlowPrefill's polynomial that predicts prefill time from prompt tokens (section 6.4, TTFT prediction)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from ..api.errors import InvalidValue
from ..api.perf import Array, Load
from .fit import proportional
from .model import whole_steps


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A prompt of n tokens takes start + linear*n + square*n^2, in one step. A `Form`.

    The paper predicts whole prompts. The rest of a started prompt is the difference of the polynomial at
    its two ends, with `start` added for each further step. The paper does not model decode steps, which run
    on other instances. Here they take base + row*rows + context*(sum of contexts), FairBatching's linear
    form; in a mixed step these row and context terms are added to the time of the chunk.
    """

    start: float
    linear: float
    square: float
    base: float = 0.0
    row: float = 0.0
    context: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise InvalidValue(f"{field.name}={value!r} must be 0 or more seconds", field.name)

    def step_time(self, load: Load) -> float:
        rows = self.row * load.decode + self.context * load.context
        if not load.prefill:
            return self.base + rows
        return self.start + self.linear * load.prefill + self.square * 2 * load.quadratic + rows

    def decode_times(self, rows: Array, longest: Array, context: Array) -> Array:
        result: Array = self.base + self.row * np.asarray(rows, dtype=float) + self.context * context
        return result

    def prefill_times(self, tokens: Array, context: Array, chunk: int) -> Array:
        full, last = whole_steps(tokens, chunk)
        result: Array = self.start * (full + (last > 0)) + tokens * (self.linear + self.square * (2 * context + tokens))
        return result

    @classmethod
    def fitted(cls, measured: Iterable[tuple[Load, float]]) -> Polynomial:
        """Fit to steps of prompt tokens alone and steps of decodes alone, by least squares (`fit.proportional`).

        Raises InvalidValue without steps of the former kind.
        """
        steps = [(load, seconds) for load, seconds in measured if seconds > 0]
        prompts = [(load, seconds) for load, seconds in steps if load.prefill and not load.decode]
        rows = [(load, seconds) for load, seconds in steps if load.decode and not load.prefill]
        if not prompts:
            raise InvalidValue("no measured steps of prompt tokens alone to fit a polynomial to", "measured")
        chunks = _solve(((1.0, load.prefill, 2 * load.quadratic), seconds) for load, seconds in prompts)
        return cls(*chunks, *_solve(((1.0, load.decode, load.context), seconds) for load, seconds in rows))


def _solve(steps: Iterable[tuple[tuple[float, float, float], float]]) -> tuple[float, float, float]:
    rows = list(steps)
    if not rows:
        return 0.0, 0.0, 0.0
    table = np.array([row for row, _ in rows], dtype=float)
    a, b, c = proportional(table, np.array([seconds for _, seconds in rows])).tolist()
    return a, b, c
