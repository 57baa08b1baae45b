"""Garbage collection outside of steps, and a record of the remaining stalls (FairBatching).

Automatic garbage collection can stop the process in the middle of a step. While an engine serves,
the objects from warm-up are frozen, automatic collection is off, and the engine collects when it is
idle or when the slack allows it.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import sys
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from time import perf_counter

STALL = 5e-3  # seconds: an event loop that is busy for longer delays something
EDGES = (STALL, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)  # seconds: upper edges of the histogram
SWITCH = 0.5e-3  # seconds: with Python's 5 ms, detokenizing threads delay the thread that plans the next step
LOOK = 0.05  # seconds between two looks for a gap
SHARE = 0.1  # largest share of the least slack that a collection may take
FULL_SHARE = 0.05  # largest share of time that full collections may take
GROWN = 1.25  # growth of memory blocks since the last full collection beyond which slack no longer counts
FORGETS = 0.97  # decay of a generation's cost after a look without a gap: other threads may have slowed its measurement


class Stalls:
    """Times longer than STALL in which an event loop could not react to events. Writer: its thread."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.sizes = [0] * (len(EDGES) + 1)

    def saw(self, seconds: float) -> None:
        if seconds > STALL:
            self.count += 1
            self.seconds += seconds
            self.sizes[bisect_left(EDGES, seconds)] += 1


class WatchedSelector(selectors.DefaultSelector):
    """A selector that measures its event loop's stalls.

    A stall is a long run of callbacks between two polls, or a timer that fires late because another
    thread holds the interpreter.
    """

    def __init__(self, stalls: Stalls) -> None:
        super().__init__()
        self._stalls = stalls
        self._back: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        begin = perf_counter()
        if self._back is not None:
            self._stalls.saw(begin - self._back)
        ready = super().select(timeout)
        self._back = perf_counter()
        if timeout and timeout > 0 and not ready:
            self._stalls.saw(self._back - begin - timeout)
        return ready


def watched_loop(stalls: Stalls) -> asyncio.AbstractEventLoop:
    """Create an event loop with counted stalls."""
    return asyncio.SelectorEventLoop(WatchedSelector(stalls))


class _Process:
    """Garbage collector settings of the process, shared by its engines, as found by the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._frozen = False
        self._enabled = True
        self._interval = 0.0

    def pause(self, *, freeze: bool = False) -> None:
        """Turn automatic collection off until `resume`. freeze: an engine is about to serve."""
        with self._lock:
            if self._users == 0:
                self._enabled, self._interval = gc.isenabled(), sys.getswitchinterval()
            self._users += 1
            gc.disable()
            if freeze:
                gc.collect()
                gc.freeze()  # objects from loading stay: scanning them in every collection is slow and frees nothing
                sys.setswitchinterval(SWITCH)
                self._frozen = True

    def resume(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if self._frozen:
                gc.unfreeze()
                self._frozen = False
            sys.setswitchinterval(self._interval)
            if self._enabled:
                gc.enable()


_process = _Process()


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep automatic garbage collection off during startup, when almost every new object stays."""
    _process.pause()
    try:
        yield
    finally:
        _process.resume()


class GCControl:
    """The garbage collector while one engine serves; the last engine to end restores its settings.

    Writer: the engine's thread, except for `begin` and `end`.
    """

    def __init__(self, slack: Callable[[], float]) -> None:
        """slack: returns, in the engine's thread, the seconds before anything is late; inf if idle."""
        self.collections: Counter[str] = Counter()  # by reason: idle, slack, memory
        self.seconds = 0.0
        self._slack = slack
        self._holds = False
        self._cost = [1e-3, 5e-3, 50e-3]  # seconds per generation; guesses until the first collection of each
        self._full_at = -inf
        self._blocks = 0  # allocated after the last full collection
        self._young = False  # younger generations were collected since the last full collection

    def begin(self) -> None:
        """Take control of the collector, after warm-up."""
        _process.pause(freeze=True)
        self._holds, self._full_at, self._blocks = True, perf_counter(), sys.getallocatedblocks()

    def end(self) -> None:
        """Restore the collector's settings; no effect if control has ended or not begun."""
        if self._holds:
            self._holds = False
            _process.resume()

    async def tend(self) -> None:
        """Look for gaps, until cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            if self._holds:
                self.look()

    def look(self) -> None:
        """Collect if there is garbage to collect and enough slack."""
        allocated, limits = gc.get_count(), gc.get_threshold()
        ripe = allocated[0] > (limits[0] or 700)
        if not ripe and not self._young:
            return
        slack, rested = self._slack(), perf_counter() - self._full_at
        if slack == inf:
            if rested >= max(1.0, self._cost[2] / FULL_SHARE):
                self._collect(2, "idle")
            elif ripe:
                self._collect(0, "idle")
            return
        if not ripe:
            return
        if sys.getallocatedblocks() > GROWN * self._blocks and rested >= self._cost[2] / FULL_SHARE:
            self._collect(2, "memory")
            return
        generation = 2 if allocated[2] > limits[2] else 1 if allocated[1] > limits[1] else 0
        while generation >= 0 and self._cost[generation] > SHARE * slack:
            if generation < 2:
                self._cost[generation] *= FORGETS
            generation -= 1
        if generation >= 0:
            self._collect(generation, "slack")

    def _collect(self, generation: int, why: str) -> None:
        begin = perf_counter()
        gc.collect(generation)
        took = perf_counter() - begin
        self._cost[generation] = took
        self._young = generation < 2
        if generation == 2:
            self._full_at, self._blocks = begin + took, sys.getallocatedblocks()
        self.collections[why] += 1
        self.seconds += took
