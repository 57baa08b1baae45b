"""Work of a server's start that blocks, in threads beside its event loop: above all, engines in other processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from jaxserve.config import ServeConfig
from jaxserve.errors import JaxserveError
from jaxserve.fleet.scaler import ReplicaScaler
from jaxserve.fleet.supervisor import CLOSING, Engines
from jaxserve.report.start import StartProgress
from jaxserve.wire.address import Place

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Return the result of `work`, which runs in a thread that does not keep the process from ending."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # the thread sets the result even if the caller is cancelled

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="jaxserve-start", daemon=True).start()
    return await asyncio.wrap_future(future)


class Beside:
    """The engines of a server in other processes, and what scales them. Writers: `run`, then `close`."""

    def __init__(self, config: ServeConfig, start: Callable[[ServeConfig], Engines]) -> None:
        """start: starts the engines, without waiting until they are ready."""
        self._config = config
        self._start = start
        self._lock = threading.Lock()  # while `start` runs
        self._engines: Engines | None = None
        self._scaler: ReplicaScaler | None = None
        self._closed = False

    @property
    def progress(self) -> StartProgress:
        """The progress of the engine that is furthest from ready."""
        return StartProgress() if self._engines is None else self._engines.progress

    def run(self) -> Sequence[Place]:
        """Start the engines, and return their places once they are ready. Raises what keeps one from starting."""
        with self._lock:
            if self._closed:
                raise JaxserveError("the server closes")
            self._engines = engines = self._start(self._config)
            if self._config.max_replicas is not None:
                self._scaler = ReplicaScaler(engines, self._config)
        engines.wait()
        if self._scaler is not None:
            self._scaler.start()
        return engines.places

    def close(self) -> bool:
        """Close all engines; return False if one had to be killed."""
        begun = not self._lock.acquire(timeout=CLOSING)  # joining a Ray cluster can hang
        self._closed = True
        if begun:
            return False
        self._lock.release()
        if self._scaler is not None:
            self._scaler.close()
        return self._engines is None or self._engines.close()
