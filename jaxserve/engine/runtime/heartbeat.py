"""Whether an event loop on another thread still responds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress


class Heartbeat:
    """Asks a loop for a sign of life. Writers: `silence`, from any thread, and the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float]) -> None:
        self._loop = loop
        self._clock = clock
        self._asked: float | None = None  # when the loop was asked for a sign that it has not given yet

    def silence(self) -> float:
        """Return the seconds for which the loop has owed a sign; asks for the next one where it owes none."""
        if self._asked is not None:
            return self._clock() - self._asked
        self._asked = self._clock()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._sign)
        return 0.0

    def _sign(self) -> None:
        self._asked = None
