"""What is worked out about each instance, kept until that one changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from .scheduler import Scheduler

T = TypeVar("T")


class InstanceMemo(Generic[T]):
    """`work_out` of an instance and the time at which its next step can begin. May look at its tables, its role, its
    step-time model, its drafts, its free pages and that time alone. Writer: who holds it."""

    def __init__(self, work_out: Callable[[Scheduler, float], T]) -> None:
        self._work_out = work_out
        self._kept: WeakKeyDictionary[Scheduler, tuple[Any, T]] = WeakKeyDictionary()

    def of(self, one: Scheduler, now: float) -> T:
        start = max(now, one.ends)
        state = (start, one.version, one.perf.version, one.blocks.available, one.counters.steps, one.role)
        before = self._kept.get(one)
        if before is not None and before[0] == state:
            return before[1]
        found = self._work_out(one, start)
        self._kept[one] = state, found
        return found
