"""A step-time model that knows what drafting and verifying take, by measuring it."""

from __future__ import annotations

from collections.abc import Iterable
from math import log2

from ..api.perf import Array, Load, PerfModel

WEIGHT = 0.1  # of a new measurement
FIRST = 1.5  # times a step without drafts of as many tokens, where nothing like it was ever measured


class Drafted:
    """What `inner` says of the tokens, times what such steps took by how much longer they were: by drafted tokens, and
    by tokens of the step in steps of the square root of two. A PerfModel. Writer: the Scheduler that observes steps.

    inner: of everything else; it never sees a step that drafts.
    """

    def __init__(self, inner: PerfModel, points: Iterable[tuple[Load, float]] = ()) -> None:
        self._inner = inner
        self._ratios: dict[tuple[int, int], float] = {}
        self.version = inner.version
        for load, seconds in points:
            if load.drafts:
                self.observe(load, seconds)

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
        """As measured, or of what is nearest: as many drafted tokens first, then as many tokens."""
        cell = _cell(load)
        if cell in self._ratios or not self._ratios:
            return self._ratios.get(cell, FIRST)
        nearest = min(self._ratios, key=lambda one: (4 * abs(one[0] - cell[0]) + abs(one[1] - cell[1]), one))
        return self._ratios[nearest]


def _cell(load: Load) -> tuple[int, int]:
    return load.drafts, round(2.0 * log2(max(1, load.decode)))
