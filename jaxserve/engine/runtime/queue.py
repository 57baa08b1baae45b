"""How many requests may wait, and for how long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from jaxserve.errors import InvalidValue, QueueFull, short

ROWS = 16  # requests that may wait for each row of an instance, where nothing else is said
RECENT = 64  # ends of requests from which the rate is taken
SHARE = 0.1  # of the queue: after that is worked off a client may try again
SOONEST, LATEST = 1.0, 60.0  # seconds that a client is told to wait


class Queue:
    """The bound of an engine's queue and its timeout.

    Writer: the engine's thread; `check` may be called from any other.
    """

    def __init__(
        self, bound: int | None, timeout: float, clock: Callable[[], float], expire: Callable[[int, float], None]
    ) -> None:
        """`bound`: requests for each instance that takes prompts; None: no bound. `timeout`: seconds until a request
        that has not begun is given up by `expire(id, seconds)`; 0: never."""
        self.bound = bound
        self._timeout = timeout
        self._clock = clock
        self._expire = expire
        self._ends: deque[float] = deque(maxlen=RECENT)
        self._waiting: deque[tuple[float, int]] = deque()  # when to look at it, request; in that order
        self._timer: asyncio.TimerHandle | None = None

    def check(self, waiting: int, instances: int) -> None:
        """Raises QueueFull where `waiting` requests are as many as `instances` may have waiting."""
        if self.bound is None or waiting < self.bound * max(1, instances):
            return
        raise QueueFull(
            f"{waiting} requests wait, and max_num_queued_reqs={self.bound} for each of {instances} instances that "
            "take prompts: try again later",
            self.retry_after(waiting),
        )

    def check_outputs(self, prompts: int, n: int, instances: int) -> None:
        """Raises InvalidValue where one request has more outputs than `instances` may ever have waiting."""
        if self.bound is None or prompts * n <= (most := self.bound * max(1, instances)):
            return
        raise InvalidValue(
            f"{prompts} prompts times n={short(n)} are {short(prompts * n)} outputs, and at most {most} may wait "
            f"(max_num_queued_reqs={self.bound} for each of {instances} instances that take prompts): ask for fewer",
            "n",
        )

    def retry_after(self, waiting: int) -> float:
        """Seconds in which a part of the queue is worked off, as fast as requests ended lately."""
        ends = list(self._ends)
        if len(ends) < 2 or ends[-1] <= ends[0]:
            return SOONEST
        rate = (len(ends) - 1) / max(self._clock() - ends[0], ends[-1] - ends[0])
        return min(max(SHARE * waiting / rate, SOONEST), LATEST)

    def ended(self) -> None:
        """A request is over."""
        self._ends.append(self._clock())

    def entered(self, request: int) -> None:
        """A request begins to wait. In the engine's thread."""
        if self._timeout > 0:
            self._waiting.append((self._clock() + self._timeout, request))
            if self._timer is None:
                self._look()

    def _look(self) -> None:
        """Give up what has waited too long; requests that have begun, or are over, are passed by."""
        self._timer, now = None, self._clock()
        while self._waiting and self._waiting[0][0] <= now:
            _, request = self._waiting.popleft()
            self._expire(request, self._timeout)
        if self._waiting:
            left = self._waiting[0][0] - now
            self._timer = asyncio.get_running_loop().call_later(max(left, 1e-3), self._look)
