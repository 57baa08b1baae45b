"""Calls from other threads to the engine's event loop, between which its steps go on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

SLICE = 2e-3  # seconds of calls before what else waits for the loop: the results of steps, and the plan of the next


class Intake:
    """Runs calls in the order in which they came, a few at a time: a thousand requests at once stop no step.

    `__call__` may be used from any thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._due = False  # `_run` will be called

    def __call__(self, call: Callable[..., None], *given: Any) -> None:
        """Let the loop call a function. Raises RuntimeError if the loop is closed."""
        self._calls.append((call, given))
        if not self._due:
            self._due = True
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._due = False  # before the calls are looked at, so that one that comes from now on is not forgotten
        until = perf_counter() + SLICE
        try:
            while self._calls:
                call, given = self._calls.popleft()
                call(*given)
                if perf_counter() > until:
                    break
        finally:
            if self._calls and not self._due:
                self._due = True
                self._loop.call_soon(self._run)
