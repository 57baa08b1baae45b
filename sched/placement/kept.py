"""What is worked out about each instance, kept until that one changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..scheduler import Scheduler
from . import Fleet

T = TypeVar("T")


class Kept(Generic[T]):
    """`work_out` of an instance, its index and the time at which its next step can begin. May look at its tables, its
    step-time model, its free pages and that time alone. Writer: the placement that holds it."""

    def __init__(self, work_out: Callable[[int, Scheduler, float], T]) -> None:
        self._work_out = work_out
        self._kept: dict[int, tuple[Any, T]] = {}

    def of(self, index: int, fleet: Fleet) -> T:
        one = fleet.instances[index]
        start = max(fleet.now, one.ends)
        state = (start, one.version, one.perf.version, one.blocks.available)
        before = self._kept.get(index)
        if before is not None and before[0] == state:
            return before[1]
        found = self._work_out(index, one, start)
        self._kept[index] = state, found
        return found
