"""Detection of hung steps. A hung device raises nothing, so only the clock can tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

AGAIN = 1.0  # seconds until a second look: if the process was stopped, the clock runs ahead of results
SOONEST = 1e-3  # seconds: shortest timer; a shorter one may vanish in rounding


class Patience(NamedTuple):
    """The time after which a step or a transfer counts as hung."""

    seconds: float = 30.0  # lower bound
    factor: float = 20.0  # multiple of the predicted duration

    def of(self, predicted: float) -> float:
        """Return the seconds allowed for an operation predicted to take `predicted` seconds."""
        return max(self.seconds, self.factor * predicted)


PATIENT = Patience()


class Watchdog:
    """A timer that calls `overdue(seconds)` once for a step that runs longer than `patience` allows.

    At most one timer is set, and only while a step runs. A timer per step would be too expensive,
    and a timer between steps would keep a simulation from running out of events. Writer: the Core
    that holds it.
    """

    def __init__(self, patience: Patience, clock: Callable[[], float], overdue: Callable[[float], None]) -> None:
        self._patience = patience
        self._clock = clock
        self._overdue = overdue
        self._since: float | None = None  # start of the running step; None between steps and once overdue
        self._most = 0.0
        self._suspicious = False
        self._timer: asyncio.TimerHandle | None = None

    def began(self, predicted: float) -> None:
        """Start watching the oldest submitted step, which begins now."""
        self._since, self._most, self._suspicious = self._clock(), self._patience.of(predicted), False
        if self._timer is None:
            self._set(self._most)

    def ended(self) -> None:
        """Stop watching the step."""
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
