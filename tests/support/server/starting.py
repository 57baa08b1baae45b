"""A server in a thread of the test process whose engine starts when a test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx

from jaxserve.config import ServeConfig
from jaxserve.report.start import StartProgress
from jaxserve.server.door import Door, ServerStart
from jaxserve.server.keys import Keys
from jaxserve.server.service import Service
from jaxserve.server.serving import Ending, listen_on, serve_from_start
from jaxserve.server.start_times import StartTime
from tests.support.timing import PATIENCE, until


class Starting:
    """A server that starts, until `open`, `fail` or `interrupt`."""

    def __init__(self, config: ServeConfig, last: StartTime | None = None) -> None:
        self.config = config
        self.progress = StartProgress()
        self.door = Door(config, Keys.of(config), ServerStart(last, lambda: self.progress))
        self.raised: BaseException | None = None  # by serve_from_start
        self.ending: Ending | None = None
        self._sock = listen_on("127.0.0.1", 0)
        self.url = f"{'https' if config.ssl_certfile else 'http'}://127.0.0.1:{self._sock.getsockname()[1]}"
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        assert self._opened.wait(PATIENCE), "the port did not open"
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, verify=False)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.raised = error

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._service: asyncio.Future[Service] = self._loop.create_future()

        async def make() -> Service:
            return await self._service

        def ready(ending: Ending) -> None:
            self.ending = ending

        await serve_from_start(
            self.door, self.config, self._sock, make, ready=ready, signals=self, opened=self._opened.set  # type: ignore[arg-type]
        )  # fmt: skip

    def serve(self, loop: Any, drain: Callable[[], None], now: Callable[[], None]) -> None:
        """Take the place of `Signals.serve`."""
        self._heard = {"SIGTERM": drain, "SIGINT": now}

    def call(self, work: Callable[..., object], *given: Any) -> None:
        self._loop.call_soon_threadsafe(work, *given)

    def open(self, service: Service) -> None:
        """Let the engine be ready; returns once the service answers."""
        self.call(self._service.set_result, service)
        until(lambda: self.ending is not None)

    def fail(self, error: BaseException) -> None:
        """Let the start fail; returns at the end of the server."""
        self.call(self._service.set_exception, error)
        self._join()

    def interrupt(self, name: str) -> None:
        """Let a signal arrive; returns at the end of the server."""
        self.call(self._heard[name])
        self._join()

    def _join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the server did not end"
        self._sock.close()

    def stop(self) -> None:
        self.http.close()
        if self._thread.is_alive():
            self.interrupt("SIGINT")
        self._sock.close()
