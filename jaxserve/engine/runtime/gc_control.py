"""Host hygiene (FairBatching): Python's own pauses kept out of steps, and the pauses that are left counted.

Automatic garbage collection stops the process when a counter says so, in the middle of anything. While an engine
serves, what warm-up made is frozen, automatic collection is off, and the engine collects where nobody waits for it.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import sys
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import inf
from time import perf_counter

from jaxserve.sched.api.request import BEST_EFFORT, Request

STALL = 5e-3  # seconds: a loop that looks away for longer is late for somebody
EDGES = (STALL, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)  # seconds: upper edges of the histogram; above: the rest
SWITCH = 0.5e-3  # seconds: Python's 5 ms let whoever detokenises hold up the thread that plans the next step
LOOK = 0.05  # seconds between two looks for a gap
SHARE = 0.1  # of the least slack, which a collection may take
FULL_SHARE = 0.05  # of the time, which full collections may take
UNPROMISED = 0.05  # seconds: the slack of requests that have no objective to keep
GROWN = 1.25  # times the memory blocks after the last full collection: beyond, memory counts for more than slack
FORGETS = 0.97  # what a look without a gap makes of a cost: it may have been measured while others held the processor


class Stalls:
    """Times longer than STALL in which an event loop could hear of nothing. Writer: the loop's thread."""

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
    """A selector that tells how long its event loop ran callbacks between two looks at events, and how much too late
    a timer woke it (another thread held the interpreter)."""

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
    """A new event loop whose stalls are counted."""
    return asyncio.SelectorEventLoop(WatchedSelector(stalls))


def least_slack(residents: Iterable[tuple[float, Iterable[Request]]]) -> float:
    """Least time by which a request's next token is due after the predicted end of its instance's step. Seconds; inf
    where nothing runs.

    `residents`: (predicted end, requests) of each instance. What is late already, or was promised nothing, counts as
    UNPROMISED: not at all would hold it up, and as late, overload would keep garbage for ever.
    """
    least = inf
    for end, requests in residents:
        for one in requests:
            slack = -1.0 if one.tier == BEST_EFFORT else one.deadline - end
            least = min(least, slack if 0 <= slack < inf else UNPROMISED)
    return least


class _Process:
    """What is the process's and not one engine's: how the collector was set before the first engine needed it off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._frozen = False
        self._enabled = True
        self._interval = 0.0

    def pause(self, *, freeze: bool = False) -> None:
        """No automatic collection until `resume`. `freeze`: an engine is about to serve."""
        with self._lock:
            if self._users == 0:
                self._enabled, self._interval = gc.isenabled(), sys.getswitchinterval()
            self._users += 1
            gc.disable()
            if freeze:
                gc.collect()
                gc.freeze()  # what was loaded stays: looking at it in every collection takes long and finds nothing
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
    """Keep automatic garbage collection off: for a start, where nearly all that is made stays."""
    _process.pause()
    try:
        yield
    finally:
        _process.resume()


class GCControl:
    """The collector while one engine serves; with the last engine of a process it is as it was before the first.

    Writer: the engine's thread, but for `begin` and `end`.
    """

    def __init__(self, slack: Callable[[], float]) -> None:
        """`slack` says, in the engine's thread, how many seconds may go by before anything is late; inf: idle."""
        self.collections: Counter[str] = Counter()  # by why: idle, slack, memory
        self.seconds = 0.0
        self._slack = slack
        self._holds = False
        self._cost = [1e-3, 5e-3, 50e-3]  # seconds, per generation: a guess until the first of each
        self._full_at = -inf
        self._blocks = 0  # allocated when the last full collection was over
        self._young = False  # younger generations were collected since the last full collection

    def begin(self) -> None:
        """After warm-up."""
        _process.pause(freeze=True)
        self._holds, self._full_at, self._blocks = True, perf_counter(), sys.getallocatedblocks()

    def end(self) -> None:
        """As it was before; nothing where it has ended, or not begun."""
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
        """Collect where there is something to collect and a gap to do it in."""
        made, limits = gc.get_count(), gc.get_threshold()
        ripe = made[0] > (limits[0] or 700)
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
        generation = 2 if made[2] > limits[2] else 1 if made[1] > limits[1] else 0
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
