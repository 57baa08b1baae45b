"""A step-time model that learns what drafting and verifying take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log2

from ..api.perf import Array, Load, PerfModel

WEIGHT = 0.1  # of a new measurement
FIRST = 1.5  # ratio to a step of as many tokens without drafts, until a step with drafts was measured


class Drafted:
    """Another model, with measured ratios for steps that draft. A `PerfModel`.

    A ratio is measured time over the time that `inner` predicts without drafts. There is one per number of
    drafted tokens and per number of tokens in the step, in factors of the square root of two. `inner`
    never observes a step that drafts. Writer: the Scheduler that observes steps.
    """

    def __init__(self, inner: PerfModel, points: Iterable[tuple[Load, float]] = ()) -> None:
        self._inner = inner
        self._ratios: dict[tuple[int, int], float] = {}
        self.version = inner.version
        for load, seconds in points:
            if load.drafts:
                self.observe(load, seconds)

    @classmethod
    def known(cls, inner: PerfModel, ratios: dict[tuple[int, int], float], version: int) -> Drafted:
        """Create a model with these ratios, see `ratios`."""
        model = cls(inner)
        model._ratios, model.version = ratios, version
        return model

    @property
    def inner(self) -> PerfModel:
        """The model of steps that do not draft."""
        return self._inner

    @property
    def ratios(self) -> Mapping[tuple[int, int], float]:
        """The measured ratios, by drafted tokens and size of the step."""
        return self._ratios

    @property
    def prefill_rate(self) -> float:
        return self._inner.prefill_rate

    def step_time(self, load: Load) -> float:
        if not load.drafts:
            return self._inner.step_time(load)
        plain = load._replace(drafts=0)
        rows = plain._replace(prefill=0, quadratic=0.0, prefix=0)
        return self._inner.step_time(plain) + (self._ratio(load) - 1.0) * self._inner.step_time(rows)

    def decode_times(self, rows: Array, longest: Array, context: Array) -> Array:
        return self._inner.decode_times(rows, longest, context)

    def prefill_times(self, tokens: Array, context: Array, chunk: int) -> Array:
        return self._inner.prefill_times(tokens, context, chunk)

    def observe(self, load: Load, seconds: float) -> None:
        if not load.drafts:
            self._inner.observe(load, seconds)
            self.version += 1
            return
        predicted = self._inner.step_time(load._replace(drafts=0))
        if load.prefill or predicted <= 0 or not 0 < seconds < float("inf"):
            return
        cell, ratio = _cell(load), seconds / predicted
        before = self._ratios.get(cell)
        self._ratios[cell] = ratio if before is None else before + WEIGHT * (ratio - before)
        self.version += 1

    def _ratio(self, load: Load) -> float:
        """Return the ratio as measured, or the nearest one: by drafted tokens first, then by tokens."""
        cell = _cell(load)
        if cell in self._ratios or not self._ratios:
            return self._ratios.get(cell, FIRST)
        nearest = min(self._ratios, key=lambda other: (4 * abs(other[0] - cell[0]) + abs(other[1] - cell[1]), other))
        return self._ratios[nearest]


def _cell(load: Load) -> tuple[int, int]:
    return load.drafts, round(2.0 * log2(max(1, load.decode)))
