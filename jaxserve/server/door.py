"""The ASGI application of a server from the moment its port opens: state at once, requests once the engine is ready.

Until then probes say how far the start is, `/v1/models` answers, and other requests wait with the same
bounds, keys and limits that hold later, or get 503 (`--no-queue-at-start`). Then the service's application
takes their place. Imports neither jax nor transformers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.config import ServeConfig
from jaxserve.engine.runtime.queue import ROWS
from jaxserve.errors import QueueFull
from jaxserve.report.dashboard_page import ABOUT, HEADERS, about, files
from jaxserve.report.start import StartProgress
from jaxserve.server.engine_metrics import READY
from jaxserve.server.failures import Refused, body_of, response_of
from jaxserve.server.fairness import arrived_at_start
from jaxserve.server.guard import Guard, cors_of
from jaxserve.server.keys import Keys
from jaxserve.server.limits import load_limits
from jaxserve.server.metrics import CONTENT_TYPE
from jaxserve.server.model_list import check_model, expected_length, present_model, present_models
from jaxserve.server.start_times import StartTime

PROBES = ("/health", "/readyz", "/ping")
MODELS = "/v1/models"
BODIES = 32  # the largest bodies, of --max-body-size, that waiting requests may hold together
UNKNOWN = 5.0  # seconds of Retry-After if the end of the start is unknown
MOST = 30.0  # and at most: the last start may have been slower
WAITING = "jaxserve.waiting"  # in the scope of a request: its `_Waiting`


class ServerStart:
    """The start of a server: when it began, how long the last one took, and how far it is."""

    def __init__(self, last: StartTime | None, progress: Callable[[], StartProgress], began: float | None = None):
        """began: by time.monotonic(), which the processes of a machine share; None: now."""
        self.last = last
        self.began = time.monotonic() if began is None else began
        self._progress = progress

    @property
    def progress(self) -> StartProgress:
        return self._progress()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def left(self) -> float | None:
        """The seconds until the server should be ready; None if that is unknown."""
        left = 0.0 if self.last is None else self.last.seconds - self.elapsed
        return left if left > 0 else None

    @property
    def retry_after(self) -> float:
        return min(MOST, UNKNOWN if self.left is None else max(1.0, self.left))

    def presented(self) -> dict[str, Any]:
        step, done, total = self.progress
        return {
            "step": step,
            "done": done if total else None,
            "total": total or None,
            "elapsed_seconds": round(self.elapsed, 3),
            "last_start_seconds": None if self.last is None else self.last.seconds,
            "seconds_left": None if self.left is None else round(self.left, 3),
        }


class _Waiting:
    """A request that waits, with what has arrived of its body. Writer: the task of the request."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.messages: deque[Message] = deque()
        self.size = 0  # bytes of the body
        self.gone = False  # the client has disconnected
        self.passed = False  # nothing has been answered: the service's application takes the request

    async def receive(self) -> Message:
        """Return the messages that have arrived, then those that come."""
        return self.messages.popleft() if self.messages else await self._receive()


class Door:
    """The application. `open` and `shut` are called once, on the event loop, which is the writer."""

    def __init__(self, config: ServeConfig, keys: Keys, start: ServerStart) -> None:
        self.start = start
        self.created = int(time.time())
        self._config = config
        self._limits = load_limits(config, keys.names)
        self._clients = keys.names or ("",)
        self._length = expected_length(config)
        self._bound = config.max_num_queued_reqs or ROWS * config.rows("cpu")  # of one instance, whatever it runs on
        self._app: ASGIApp | None = None
        self._refusal: tuple[str, str] | None = None  # message and code, once there will be no service
        self._over = asyncio.Event()
        self._waiting: Counter[str] = Counter()  # requests, by client
        self._bytes = 0  # of their bodies
        self._before: ASGIApp = Guard(
            self._meanwhile, keys, config.max_body_size, draining=lambda: False, protect=config.protect_metrics
        )
        if config.origins:
            self._before = CORSMiddleware(self._before, **cors_of(config))

    @property
    def waiting(self) -> int:
        return self._waiting.total()

    def open(self, app: ASGIApp) -> None:
        """Give all requests to the service's application, those that wait first."""
        self._app = app
        self._over.set()

    def shut(self, message: str, code: str) -> None:
        """Refuse all requests with 503: there will be no service."""
        self._refusal = message, code
        self._over.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None and scope["type"] == "http":
            arrived, waiting = time.monotonic(), _Waiting(receive)
            await self._before({**scope, WAITING: waiting}, receive, send)
            if not waiting.passed:
                return
            receive = waiting.receive
            arrived_at_start.set(arrived)
        assert self._app is not None
        await self._app(scope, receive, send)

    async def _meanwhile(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that the guard has let pass, or keep it until there is a service."""
        if self._refusal is not None:
            raise self._refused()
        response = self._response(str(scope["path"]), str(scope["method"]))
        if response is not None:
            await response(scope, receive, send)
        else:
            await self._wait(scope[WAITING], receive, scope["state"]["client"])

    def _response(self, path: str, method: str) -> Response | None:
        """Return the response to a request that needs no engine; None for others."""
        reads = method in ("GET", "HEAD")
        if path in PROBES and (reads or path == "/ping"):
            return self._not_ready()
        if self._config.dashboard and reads and (page := page_response(path, self._config)) is not None:
            return page
        if path == "/livez" and reads:
            return Response(status_code=200)
        if path == "/metrics" and method == "GET":
            return Response(self._metrics(), media_type=CONTENT_TYPE)
        if path == MODELS and method == "GET":
            return JSONResponse(present_models(self._config, self._length, self.created))
        if path.startswith(MODELS + "/") and method == "GET":
            name = path.removeprefix(MODELS + "/")
            check_model(self._config, name)
            return JSONResponse(present_model(self._config, name, self._length, self.created))
        return None

    def _starting(self) -> Refused:
        text = f"the model is not ready: {self.start.progress}"
        return Refused(503, text, code="starting", retry_after=self.start.retry_after)

    def _refused(self) -> Refused:
        assert self._refusal is not None
        message, code = self._refusal
        return Refused(503, message, code=code, retry_after=UNKNOWN)

    def _not_ready(self) -> Response:
        """Return the response to a readiness probe: an error with the state of the start."""
        refused = self._starting()
        retry = {"Retry-After": response_of(refused).headers["Retry-After"]}
        startup = {**self.start.presented(), "requests_waiting": self.waiting}
        return JSONResponse({**body_of(refused), "startup": startup}, refused.status, retry)

    def _metrics(self) -> bytes:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_NotReady(self._config))
        return generate_latest(registry)

    async def _wait(self, waiting: _Waiting, receive: Receive, client: str) -> None:
        """Keep a request until the door opens. Raises Refused or QueueFull."""
        if not self._config.queue_at_start:
            raise self._starting()
        self._check(client)
        self._waiting[client] += 1
        seconds = self._config.queue_timeout or None
        try:
            async with asyncio.timeout(seconds):
                await self._collect(waiting, receive)
        except TimeoutError:
            text = f"the model was not ready within {seconds:g} s (--queue-timeout): try again later"
            raise Refused(503, text, code="queue_timeout", retry_after=self.start.retry_after) from None
        finally:
            self._waiting[client] -= 1
            self._bytes -= waiting.size
        if self._refusal is not None:
            raise self._refused()
        waiting.passed = not waiting.gone

    def _check(self, client: str) -> None:
        """Raise Refused or QueueFull if no more requests of a client may wait. The rules are those of `Stage`."""
        share, mine = self._limits.of(client).queue_share, self._waiting[client] + 1
        if share < 1 and mine > share * self._bound:
            text = f"{mine - 1} requests of this API key wait; it may fill {share:.0%} of the queue"
            raise Refused(429, text, code="queue_share", retry_after=self.start.retry_after)
        if self.waiting >= self._bound and mine > self._bound / len(self._clients):
            text = f"{self.waiting} requests wait for the model, the limit is {self._bound}: try again later"
            raise QueueFull(text, self.start.retry_after)

    async def _collect(self, waiting: _Waiting, receive: Receive) -> None:
        """Receive the body of a waiting request until the door opens or the client disconnects.

        The body must be read now, because clients would time out otherwise, and so that a disconnect is seen.
        """
        over = asyncio.ensure_future(self._over.wait())
        coming: asyncio.Future[Message] | None = None
        try:
            while not (self._over.is_set() or waiting.gone):
                coming = asyncio.ensure_future(receive())
                await asyncio.wait((over, coming), return_when=asyncio.FIRST_COMPLETED)
                if coming.done():
                    self._take(waiting, coming.result())
        finally:
            over.cancel()
            if coming is not None and not coming.done():
                coming.cancel()
                [last] = await asyncio.gather(coming, return_exceptions=True)
                if isinstance(last, dict):  # it arrived just before it was cancelled
                    self._take(waiting, last)

    def _take(self, waiting: _Waiting, message: Message) -> None:
        """Keep a message for the service. Raises QueueFull if waiting requests hold too much memory."""
        if message["type"] == "http.disconnect":
            waiting.gone = True
            return
        size = len(message.get("body", b""))
        if self._bytes + size > BODIES * self._config.max_body_size:
            text = f"the bodies of the {self.waiting} requests that wait for the model are too large: try again later"
            raise QueueFull(text, self.start.retry_after)
        waiting.messages.append(message)
        waiting.size += size
        self._bytes += size


def page_response(path: str, config: ServeConfig) -> Response | None:
    """Return a file of the dashboard; None if there is none at this path. It needs no key: it has no data."""
    file = about(config.tiers) if path == ABOUT else files().get(path)
    return None if file is None else Response(file.body, headers=HEADERS, media_type=file.type)


class _NotReady(Collector):
    """The metric of a server that starts."""

    def __init__(self, config: ServeConfig) -> None:
        self._name, self._prefix = config.names[0], config.metrics_prefix

    def collect(self) -> Iterator[Metric]:
        name, text = READY
        family = GaugeMetricFamily(self._prefix + name, text, labels=["model_name"])
        family.add_metric([self._name], 0.0)
        yield family
