"""The bound of an engine's request queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from jaxserve.errors import InvalidValue, QueueFull, short

ROWS = 16  # default bound: requests that may wait per row of an instance
RECENT = 64  # finished requests from which the rate is computed
SHARE = 0.1  # of the queue: the part that must drain before a client should retry
SOONEST, LATEST = 1.0, 60.0  # seconds; bounds of Retry-After


class Queue:
    """The bound of an engine's queue, and the rate at which requests leave it.

    Writer: the engine's thread; `check` may be called from any thread.
    """

    def __init__(self, bound: int | None, clock: Callable[[], float]) -> None:
        """bound: waiting requests per instance that takes prompts; None: unbounded."""
        self.bound = bound
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=RECENT)

    def check(self, waiting: int, instances: int) -> None:
        """Raise QueueFull if `waiting` requests reach the bound of `instances` instances."""
        if self.bound is None or waiting < self.bound * max(1, instances):
            return
        raise QueueFull(
            f"{waiting} requests are waiting; the limit is max_num_queued_reqs={self.bound} for each of {instances} "
            "instances that take prompts: try again later",
            self.retry_after(waiting),
        )

    def check_outputs(self, prompts: int, n: int, instances: int) -> None:
        """Raise InvalidValue if a request has more outputs than the queue can ever hold."""
        if self.bound is None or prompts * n <= (most := self.bound * max(1, instances)):
            return
        raise InvalidValue(
            f"{prompts} prompts times n={short(n)} are {short(prompts * n)} outputs, and at most {most} may wait "
            f"(max_num_queued_reqs={self.bound} for each of {instances} instances that take prompts): ask for fewer",
            "n",
        )

    def retry_after(self, waiting: int) -> float:
        """Return the seconds until a part of the queue has drained, at the recent rate."""
        ends = list(self._ends)
        if len(ends) < 2 or ends[-1] <= ends[0]:
            return SOONEST
        rate = (len(ends) - 1) / max(self._clock() - ends[0], ends[-1] - ends[0])
        return min(max(SHARE * waiting / rate, SOONEST), LATEST)

    def ended(self) -> None:
        """Record that a request ended."""
        self._ends.append(self._clock())
