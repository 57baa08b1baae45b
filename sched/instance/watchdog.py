"""Notice a step that does not end: a device that hangs raises nothing, so only the clock can tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

AGAIN = 1.0  # seconds: looked at twice, since a process that was stopped finds its clock advanced before its results
SOONEST = 1e-3  # seconds: less may be nothing to a clock of floats


class Patience(NamedTuple):
    """How long a step or a transfer may take before it counts as hung."""

    seconds: float = 30.0  # at least that long
    factor: float = 20.0  # times the predicted duration

    def of(self, predicted: float) -> float:
        """Seconds that something may take whose predicted duration is `predicted`."""
        return max(self.seconds, self.factor * predicted)


PATIENT = Patience()


class Watchdog:
    """Calls `overdue(seconds)` once for a step that has run for longer than `patience` allows.

    At most one timer is set, and only while a step runs: setting one per step would cost more than it tells, and a
    simulation would never run out of events. Writer: the Core that holds it.
    """

    def __init__(self, patience: Patience, clock: Callable[[], float], overdue: Callable[[float], None]) -> None:
        self._patience = patience
        self._clock = clock
        self._overdue = overdue
        self._since: float | None = None  # when the running step began; None between steps and once it is overdue
        self._most = 0.0
        self._suspicious = False
        self._timer: asyncio.TimerHandle | None = None

    def began(self, predicted: float) -> None:
        """The oldest submitted step begins now."""
        self._since, self._most, self._suspicious = self._clock(), self._patience.of(predicted), False
        if self._timer is None:
            self._set(self._most)

    def ended(self) -> None:
        """The step that began last is over."""
        self._since = None

    def _set(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(min(seconds, self._patience.seconds), self._look)

    def _look(self) -> None:
        self._timer = None
        if self._since is None:
            return
        taken = self._clock() - self._since
        if taken < self._most:
            self._suspicious = False
            self._set(max(self._most - taken, SOONEST))
        elif not self._suspicious:
            self._suspicious = True
            self._set(AGAIN)
        else:
            self._since = None
            self._overdue(taken)
