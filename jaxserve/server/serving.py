"""Serve one service over HTTP until it is told to stop, without losing running requests."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import uvicorn

from jaxserve.engine.runtime.info import Promise
from jaxserve.errors import InvalidValue
from jaxserve.report.table import print_table
from jaxserve.server.app import create_app
from jaxserve.server.protocol import limits_of, protocol_of
from jaxserve.server.service import Service
from jaxserve.server.signals import Signals
from jaxserve.server.stats_line import StatsLine
from jaxserve.server.tls import tls_of

logger = logging.getLogger("jaxserve.server")

STATS_EVERY = 10.0  # seconds
PATIENCE = 0.6  # seconds in which requests that a shutdown aborts may still send their error


class Server(uvicorn.Server):
    """A uvicorn server without signal handlers: `Signals` drains running requests first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop factory if it is installed, else None for asyncio's.

    uvloop takes a fifth less of the server thread's time per request.
    """
    if importlib.util.find_spec("uvloop") is None:
        return None
    return cast(Callable[[], asyncio.AbstractEventLoop], importlib.import_module("uvloop").new_event_loop)


def listen_on(host: str, port: int) -> socket.socket:
    """Bind a socket and return it. Raises InvalidValue that names the address if binding fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        message = f"cannot listen on {host}:{port} ({error.strerror}): choose another --port or --host"
        raise InvalidValue(message, "port") from error
    return sock


async def serve(
    service: Service,
    sock: socket.socket,
    ready: Callable[[Ending], None] | None = None,
    signals: Signals | None = None,
) -> None:
    """Serve on a bound socket until shutdown.

    Shutdown is requested through `signals`. A program that embeds a server passes `ready` instead: it
    is called with an `Ending` as soon as the server accepts requests.
    """
    config = uvicorn.Config(
        create_app(service),
        http=protocol_of(limits_of(service.config)),
        log_level=service.config.log_level,
        log_config=None,
        access_log=service.config.log_level == "debug",
        timeout_graceful_shutdown=5,
        lifespan="off",
        ws="none",
        **tls_of(service.config),
    )
    server = Server(config)
    ending = Ending(service, server)
    if signals is not None:
        signals.serve(asyncio.get_running_loop(), ending.drain, ending.now)
    helpers = [asyncio.ensure_future(_announce(service, server, sock, ready and partial(ready, ending)))]
    if not service.config.disable_log_stats:
        helpers.append(asyncio.ensure_future(_log_stats(service)))
    try:
        await server.serve(sockets=[sock])
    finally:
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)


class Ending:
    """The shutdown of a server. Writer: its event loop."""

    def __init__(self, service: Service, server: uvicorn.Server) -> None:
        self._service = service
        self._server = server
        self._task: asyncio.Task[None] | None = None

    def drain(self) -> None:
        """Refuse new requests with 503, wait for running ones up to the drain timeout, then stop.

        A second call stops at once.
        """
        if self._task is not None:
            self.now()
            return
        self._service.draining = True
        logger.info("draining: %d requests are running; a second signal aborts them", self._service.active)
        self._task = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._service.config.drain_timeout
        while self._service.active and loop.time() < end:
            await asyncio.sleep(0.05)
        if self._service.active:
            logger.warning("aborting %d requests that did not finish within the drain timeout", self._service.active)
            self.now()
        else:
            self._server.should_exit = True

    def now(self) -> None:
        """Stop at once; running requests get an error, as their response or as the last event of their stream."""
        self._service.draining = True
        self._service.ending.set()
        self._task = asyncio.ensure_future(self._leave())

    async def _leave(self) -> None:
        """Wait until running requests have sent their error, then close connections that do not read it."""
        state, loop = self._server.server_state, asyncio.get_running_loop()
        end, cut = loop.time() + PATIENCE, loop.time() + 2 * PATIENCE
        while state.tasks and loop.time() < cut:
            await asyncio.sleep(0.01)
            if loop.time() > end:
                for connection in list(state.connections):
                    connection.transport.abort()
        self._server.should_exit = self._server.force_exit = True


async def _announce(
    service: Service, server: uvicorn.Server, sock: socket.socket, ready: Callable[[], None] | None
) -> None:
    """Print the instances, the address and an example command once the server has started."""
    while not server.started:
        await asyncio.sleep(0.01)
    if ready is not None:
        ready()
        return
    info, config = service.engine.info, service.config
    rows = [
        (one.name, one.role, " ".join(map(str, one.devices)), one.pages, one.pages * one.page_size)
        for one in info.instances
    ]
    title = f"{config.names[0]}, context {info.max_model_len}, policy {info.policy}, attention {info.attention}"
    print_table(title, ("instance", "role", "devices", "pages", "tokens of KV"), rows)
    print(promise_line(info.promise))
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # nosec B104
    key = " -H 'Authorization: Bearer KEY'" if service.keys.names else ""
    scheme = "http" if config.ssl_certfile is None else "https"
    print(f"jaxserve is ready at {scheme}://{host}:{port}. Try:")
    print(
        f"  curl {scheme}://{host}:{port}/v1/completions -H 'Content-Type: application/json'{key} "
        """-d '{"prompt": "def main(", "max_tokens": 20}'"""
    )
    sys.stdout.flush()


def promise_line(promise: Promise) -> str:
    """Return the line that states the objectives of requests that set none."""
    goals = (("ttft", promise.slo.ttft, "to the first token"), ("tpot", promise.slo.tpot, "per token after it"))
    said = ", ".join(f"{seconds:g} s {what}{' (auto)' * (name in promise.automatic)}" for name, seconds, what in goals)
    return f"Objectives of requests that set none: {said}; change them with --ttft-slo, --tpot-slo."


async def _log_stats(service: Service) -> None:
    line = StatsLine(service.engine)
    loop: Any = asyncio.get_running_loop()
    line.text(loop.time())
    while True:
        await asyncio.sleep(STATS_EVERY)
        await service.engine.refresh()
        if (text := line.text(loop.time())) is not None:
            logger.info("%s", text)
