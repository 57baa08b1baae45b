"""An asyncio event loop with a clock that jumps to the next timer instead of waiting for it.

The coroutines that serve run on it unchanged. It has no sockets and no threads, so no event can come from
outside. If no callback is ready and no timer is set, nothing can ever happen again, and the loop raises an
error instead of hanging.
"""

from __future__ import annotations

import asyncio
from asyncio import base_events, events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from heapq import heappop, heappush
from typing import Any, TypeVar, TypeVarTuple

from ..api.errors import JaxserveError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

ARRIVAL, EVENT = 0, 1  # priorities of timers set for the same time


class Deadlock(JaxserveError):
    """The error raised if tasks wait and nothing is scheduled that could wake them. Names the tasks."""


class VirtualLoop(base_events.BaseEventLoop):
    """An event loop in virtual time, starting at 0. Timers fire by (time, priority, order of creation).

    All timers of one moment fire before any task that they wake, so a decision at that moment sees all of
    them. There is one thread; `run_in_executor` and sockets are refused.
    """

    _ready: deque[asyncio.Handle]  # BaseEventLoop's queue, filled by call_soon
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._timers: list[tuple[float, int, int, asyncio.TimerHandle]] = []
        self._sequence = 0

    def time(self) -> float:
        return self.now

    def at(self, when: float, priority: int, callback: Callable[[*Ts], object], *args: *Ts) -> asyncio.TimerHandle:
        """As `call_at`, with a priority: of the timers of one moment, those with the lowest priority fire first."""
        return self._set(when, priority, asyncio.TimerHandle(when, callback, args, self))

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self._set(when, EVENT, asyncio.TimerHandle(when, callback, args, self, context))

    def _set(self, when: float, priority: int, handle: asyncio.TimerHandle) -> asyncio.TimerHandle:
        if not when >= self.now:  # also true for NaN: time must not run backwards
            when = self.now
        self._sequence += 1
        heappush(self._timers, (when, priority, self._sequence, handle))
        return handle

    def _run_once(self) -> None:
        ready = self._ready
        if not ready and not self._stopping:
            self._jump()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _jump(self) -> None:
        timers = self._timers
        while timers and timers[0][3]._cancelled:
            heappop(timers)
        if not timers:
            raise Deadlock(f"nothing is scheduled at {self.now:.6f} s, but these tasks wait: {self._waiting()}")
        self.now = timers[0][0]
        while timers and timers[0][0] == self.now:
            self._ready.append(heappop(timers)[3])

    def _waiting(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        return "; ".join(map(_where, tasks)) or "none (the loop runs without a task)"

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: canceled timers are dropped when their time comes."""

    def _write_to_self(self) -> None:
        """Do nothing: this loop never sleeps."""

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        raise JaxserveError(f"{func!r} needs a thread, and the virtual loop has none")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time, then cancel what still runs. Raises Deadlock.

    A loop that runs in this thread, as in a notebook, stands still until then.
    """
    outer = events._get_running_loop()
    events._set_running_loop(None)  # asyncio refuses a loop inside another one, which could starve it; this one ends
    try:
        with asyncio.Runner(loop_factory=VirtualLoop, debug=False) as runner:
            return runner.run(main)
    finally:
        events._set_running_loop(outer)


def loop() -> VirtualLoop:
    """Return the running virtual loop. Raises JaxserveError on any other loop."""
    running = events.get_running_loop()
    if not isinstance(running, VirtualLoop):
        raise JaxserveError(f"a simulation must run on a VirtualLoop (sched.sim.clock.run), not on {running!r}")
    return running


def _where(task: asyncio.Task[Any]) -> str:
    stack = task.get_stack(limit=1)
    line = f" at {stack[-1].f_code.co_name}:{stack[-1].f_lineno}" if stack else ""
    return f"{task.get_name()} ({getattr(task.get_coro(), '__qualname__', task.get_coro())}{line})"
