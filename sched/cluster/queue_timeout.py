"""The end of requests that wait too long for their first token."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from ..instance.watchdog import SOONEST


class QueueTimeout:
    """Looks at every request once it has waited a time. Writer: the cluster's event loop."""

    def __init__(self, seconds: float, clock: Callable[[], float], late: Callable[[int], bool]) -> None:
        """seconds: the time; 0: never. late(id): whether to look at the request again after as long."""
        self.seconds = seconds
        self._clock = clock
        self._late = late
        self._waiting: deque[tuple[float, int]] = deque()  # (when to look, request), in order of time
        self._timer: asyncio.TimerHandle | None = None

    def entered(self, request: int) -> None:
        """Record that a request starts to wait."""
        if self.seconds > 0:
            self._waiting.append((self._clock() + self.seconds, request))
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(self.seconds, self._look)

    def _look(self) -> None:
        self._timer, now = None, self._clock()
        while self._waiting and self._waiting[0][0] <= now:
            _, request = self._waiting.popleft()
            if self._late(request):
                self._waiting.append((now + self.seconds, request))
        if self._waiting:
            left = max(self._waiting[0][0] - now, SOONEST)
            self._timer = asyncio.get_running_loop().call_later(left, self._look)
