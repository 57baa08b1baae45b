"""A check that an event loop on another thread still responds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress


class Heartbeat:
    """A heartbeat of an event loop. Writers: `silence`, from any thread, and the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float]) -> None:
        self._loop = loop
        self._clock = clock
        self._asked: float | None = None  # time of a request to the loop that is unanswered

    def silence(self) -> float:
        """Return the seconds since the oldest unanswered request; send one if there is none."""
        if self._asked is not None:
            return self._clock() - self._asked
        self._asked = self._clock()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._sign)
        return 0.0

    def _sign(self) -> None:
        self._asked = None
