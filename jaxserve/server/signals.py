"""Signal handling: shut the server down, even if what it waits for hangs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

logger = logging.getLogger("jaxserve.server")

GRACE = 5.0  # seconds from the second signal to the end of the process, even if something hangs


class Signals:
    """The handlers of SIGTERM and SIGINT.

    SIGTERM calls `drain` on the server's event loop, SIGINT calls `now`. A second signal ends the
    process within GRACE seconds, a third at once. The handlers belong to the process, not to the loop,
    so that they also work while the engine closes. Writer: the main thread.
    """

    def __init__(self, leave: Callable[[int], None] = os._exit) -> None:
        self._leave = leave
        self._count = 0
        self._heard: Callable[[int], None] = lambda number: leave(128 + number)

    def serve(self, loop: asyncio.AbstractEventLoop, drain: Callable[[], None], now: Callable[[], None]) -> None:
        """Direct signals to the server that runs on `loop`."""

        def heard(number: int) -> None:
            loop.call_soon_threadsafe(drain if number == signal.SIGTERM and self._count == 1 else now)

        self._heard = heard

    def served(self) -> None:
        """Let the next signal end the process: the server's loop has ended."""
        self._heard = lambda number: self._leave(128 + number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 2:
            self._leave(128 + number)
        if self._count == 2:
            logger.warning("second signal: the process ends within %g s", GRACE)
            timer = threading.Timer(GRACE, self._leave, (128 + number,))
            timer.daemon = True
            timer.start()
        self._heard(number)

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Install the handlers within the context; does nothing outside the main thread, as Python requires."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[int, Any] = {
            number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def end_process(status: int) -> None:
    """End the process at once: threads that wait for devices could keep the interpreter from exiting."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
