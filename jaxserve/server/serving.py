"""Serve one service over HTTP until it is told to stop, without losing running requests.

`serve` serves a service that is ready, `serve_from_start` opens the port while it is being made.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import uvicorn

from jaxserve.config import ServeConfig
from jaxserve.engine.runtime.info import Promise
from jaxserve.errors import InvalidValue
from jaxserve.report.table import print_table
from jaxserve.server.accepting import Acceptor
from jaxserve.server.app import create_app
from jaxserve.server.door import Door
from jaxserve.server.protocol import most_connections, protocol_of
from jaxserve.server.service import Service
from jaxserve.server.signals import Signals
from jaxserve.server.start_times import StartTime, expectation
from jaxserve.server.stats_line import StatsLine
from jaxserve.server.tls import tls_of

logger = logging.getLogger("jaxserve.server")

STATS_EVERY = 10.0  # seconds
# A client that has gone without a word, while its request waits, is noticed after two minutes instead of two hours.
KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
PATIENCE = 0.6  # seconds in which requests that a shutdown aborts may still send their error


class Server(uvicorn.Server):
    """A uvicorn server without signal handlers: `Signals` drains running requests first.

    It accepts connections one at a time.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        config = self.config
        protocol = partial(
            cast(Callable[..., asyncio.Protocol], config.http_protocol_class),
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        acceptors = [Acceptor(sock, protocol, config.ssl, config.backlog) for sock in sockets or ()]
        self.servers = cast(list[asyncio.base_events.Server], acceptors)
        self.started = True

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
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # which its connections inherit, as the next ones
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
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
    server = _server(create_app(service), service.config)
    ending = Ending(service, server)
    if signals is not None:
        signals.serve(asyncio.get_running_loop(), ending.drain, ending.now)
    told = None if ready is None else partial(ready, ending)
    await _until_stopped(service, server, asyncio.ensure_future(server.serve(sockets=[sock])), sock, told)


async def serve_from_start(
    door: Door,
    config: ServeConfig,
    sock: socket.socket,
    make: Callable[[], Awaitable[Service]],
    *,
    ready: Callable[[Ending], None] | None = None,
    signals: Signals | None = None,
    opened: Callable[[], None] = lambda: None,
) -> None:
    """Serve on a bound socket from now on, with the service that `make` returns, until shutdown.

    opened: is called when the server accepts connections, before `make`. ready, signals: see `serve`. Raises what
    `make` raises, and Interrupted if a signal ends the start; requests that wait have got 503 then.
    """
    server, stop = _server(door, config), asyncio.get_running_loop().create_future()
    ending: Ending | None = None

    def stopped(number: int) -> None:
        if ending is not None:
            (ending.drain if number == signal.SIGTERM else ending.now)()
        elif not stop.done():
            stop.set_result(number)

    if signals is not None:
        heard = partial(stopped, signal.SIGTERM), partial(stopped, signal.SIGINT)
        signals.serve(asyncio.get_running_loop(), *heard)
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    await _started(server, serving)
    opened()
    making = asyncio.ensure_future(make())
    try:
        await asyncio.wait((making, stop, serving), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        if stop.done():
            door.shut("the server is shutting down", "shutting_down")
            raise Interrupted(stop.result())
        if making.exception() is not None:
            door.shut("the server could not start: see its log", "start_failed")
        service = making.result()
    except BaseException:
        making.cancel()
        await leave(server)
        await asyncio.gather(serving, making, return_exceptions=True)
        raise
    ending = Ending(service, server)
    door.open(create_app(service, door.created))
    await _until_stopped(service, server, serving, sock, None if ready is None else partial(ready, ending))


class Interrupted(Exception):
    """Raised if a signal ends the start of a server. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {signal.Signals(number).name} during the start")
        self.number = number


def _server(app: Any, config: ServeConfig) -> Server:
    settings = uvicorn.Config(
        app,
        http=protocol_of(most_connections(config)),
        log_level=config.log_level,
        log_config=None,
        access_log=config.log_level == "debug",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=cast(int, config.keep_alive_timeout),  # any number of seconds will do
        lifespan="off",
        ws="none",
        **tls_of(config),
    )
    return Server(settings)


async def _started(server: uvicorn.Server, serving: asyncio.Future[None]) -> None:
    """Wait until the server accepts connections. Raises what kept it from that."""
    while not server.started:
        if serving.done():
            serving.result()
        await asyncio.sleep(0.01)


async def _until_stopped(
    service: Service,
    server: Server,
    serving: asyncio.Future[None],
    sock: socket.socket,
    ready: Callable[[], None] | None,
) -> None:
    """Announce a service that is ready, and wait for the end of the server."""
    helpers = [asyncio.ensure_future(_announce(service, server, sock, ready))]
    if not service.config.disable_log_stats:
        helpers.append(asyncio.ensure_future(_log_stats(service)))
    try:
        await serving
    finally:
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)


async def leave(server: uvicorn.Server) -> None:
    """Wait until running requests have sent their error, close connections that do not read it, and stop."""
    state, loop = server.server_state, asyncio.get_running_loop()
    end, cut = loop.time() + PATIENCE, loop.time() + 2 * PATIENCE
    while state.tasks and loop.time() < cut:
        await asyncio.sleep(0.01)
        if loop.time() > end:
            for connection in list(state.connections):
                connection.transport.abort()
    server.should_exit = server.force_exit = True


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
        self._task = asyncio.ensure_future(leave(self._server))


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
        (
            instance.name,
            instance.role,
            " ".join(map(str, instance.devices)),
            instance.pages,
            instance.pages * instance.page_size,
        )
        for instance in info.instances
    ]
    title = f"{config.names[0]}, context {info.max_model_len}, policy {info.policy}, attention {info.attention}"
    print_table(title, ("instance", "role", "devices", "pages", "tokens of KV"), rows)
    print(promise_line(info.promise))
    if service.sampling_defaults:
        print(sampling_line(service.sampling_defaults))
    key = " -H 'Authorization: Bearer KEY'" if service.keys.names else ""
    url = url_of(config, sock)
    if config.dashboard:
        print(f"Open {url}/ in a browser to chat and to see what the server does.")
    print(f"jaxserve is ready at {url}. Try:")
    print(
        f"  curl {url}/v1/completions -H 'Content-Type: application/json'{key} "
        """-d '{"prompt": "def main(", "max_tokens": 20}'"""
    )
    sys.stdout.flush()


def url_of(config: ServeConfig, sock: socket.socket) -> str:
    """Return the URL at which this machine reaches a server."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # nosec B104
    return f"{'http' if config.ssl_certfile is None else 'https'}://{host}:{port}"


def announce(config: ServeConfig, last: StartTime | None, sock: socket.socket) -> None:
    """Print that the port is open, and when the model will be ready. last: the start before this one."""
    with contextlib.suppress(OSError):  # a full disk, or a reader of the output that has gone
        print(f"jaxserve opens {url_of(config, sock)} now; {expectation(last)}", flush=True)


def promise_line(promise: Promise) -> str:
    """Return the line that states the objectives of requests that set none."""
    goals = (("ttft", promise.slo.ttft, "to the first token"), ("tpot", promise.slo.tpot, "per token after it"))
    said = ", ".join(f"{seconds:g} s {what}{' (auto)' * (name in promise.automatic)}" for name, seconds, what in goals)
    return f"Objectives of requests that set none: {said}; change them with --ttft-slo, --tpot-slo."


def sampling_line(defaults: Mapping[str, Any]) -> str:
    """Return the line that states how tokens of requests that set nothing are sampled."""
    said = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    return f"Sampling of requests that set none: {said} (generation_config.json); --generation-config vllm ignores it."


async def _log_stats(service: Service) -> None:
    line = StatsLine(service.engine)
    loop: Any = asyncio.get_running_loop()
    line.text(loop.time())
    while True:
        await asyncio.sleep(STATS_EVERY)
        await service.engine.refresh()
        if (text := line.text(loop.time())) is not None:
            logger.info("%s", text)
