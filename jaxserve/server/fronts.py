"""The processes that serve HTTP for an engine in another one.

Fronts share one listening socket; the system gives each new connection to one of them. A front that
ends unexpectedly loses its open connections, and another one replaces it, later each time. If none
serves and none can start, the server ends with the reason.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, NamedTuple

import prometheus_client

from jaxserve.config import ServeConfig
from jaxserve.engine.runtime.gc_control import GCControl
from jaxserve.errors import JaxserveError
from jaxserve.fleet.messages import Failure
from jaxserve.fleet.processes import start_blocked
from jaxserve.fleet.replicas import Replicas
from jaxserve.fleet.supervisor import LASTING, pause
from jaxserve.models.source import find_tokenizer
from jaxserve.report.logs import log_to_stderr
from jaxserve.report.start import StartProgress
from jaxserve.sched.instance.slack import UNPROMISED
from jaxserve.server.beside import Beside, in_thread
from jaxserve.server.door import Door, ServerStart
from jaxserve.server.keys import Keys
from jaxserve.server.metrics import SHARED
from jaxserve.server.service import Service
from jaxserve.server.serving import Interrupted, announce, loop_factory, serve, serve_from_start
from jaxserve.server.signals import Signals, end_process
from jaxserve.server.start_times import StartTime, last_start, remember
from jaxserve.settings.seeds import request_seed
from jaxserve.wire.address import Place

logger = logging.getLogger("jaxserve.server")

Told = StartProgress | Failure | tuple[Place, ...]  # how far the start is, why it failed, or where the engines are

SIGNALS = (signal.SIGTERM, signal.SIGINT)
TELLING = 0.2  # seconds between two reports of progress to the fronts
UNSERVED = 4  # fronts in a row that end before they serve: if none serves, the server gives up


def begin_process(config: ServeConfig) -> None:
    """Set up logging and metrics of a process that serves HTTP."""
    log_to_stderr(config.log_level)
    quieter: Callable[[], None] = prometheus_client.disable_created_metrics
    quieter()  # drop the `_created` series beside each counter


async def serve_remote(
    config: ServeConfig,
    door: Door | None,
    places: Callable[[], Awaitable[Sequence[Place]]],
    sock: socket.socket,
    signals: Signals,
    index: int = 0,
    served: Callable[[], None] = lambda: None,
) -> None:
    """Serve HTTP for the engines at `places`, which it returns once they are ready, until shutdown.

    door: None: connections are accepted only then, for other fronts serve already. index: of this front. served: is
    called then. Raises what `places` raises, and Interrupted: see `serve_from_start`.
    """
    # Requests of two fronts must not share seeds: equal prompts would get equal samples.
    seed = request_seed(config.seed) + f".{index}" * (index > 0)
    closing = ExitStack()
    collector = GCControl(lambda: UNPROMISED)  # a large body is many objects: to look through them holds up streams

    async def make() -> Service:
        tokenizer, engine_places = await asyncio.gather(in_thread(lambda: find_tokenizer(config)), places())
        engine = await Replicas.connect(
            engine_places, seed, config.replica_routing, config.api_server_count, partly=config.max_replicas is not None
        )
        closing.callback(engine.close)
        service = Service(engine, tokenizer, config)
        closing.callback(service.close)
        engine.on_continued = service.metrics.continued
        if index == 0 and door is not None:
            remember(config, StartTime(door.start.elapsed, engine.stats().compilations))
        collector.begin()
        closing.callback(collector.end)
        closing.callback(asyncio.ensure_future(collector.tend()).cancel)
        served()
        return service

    with closing:
        if door is None:
            await serve(await make(), sock, signals=signals)
        else:
            opened = (lambda: None) if index else partial(announce, config, door.start.last, sock)
            await serve_from_start(door, config, sock, make, signals=signals, opened=opened)


class Start(NamedTuple):
    """What a front knows of the start of its server."""

    last: StartTime | None
    began: float  # by time.monotonic()
    over: bool = False  # the engines are ready


class Fronts:
    """Several front processes, from before the engines are ready. Writer: the main thread."""

    def __init__(self, config: ServeConfig, beside: Beside, sock: socket.socket) -> None:
        self._config, self._beside, self._sock = config, beside, sock
        self._start = Start(last_start(config), time.monotonic())
        self._spawn = multiprocessing.get_context("spawn")
        self._alive: dict[int, _Front] = {}
        self._due: dict[int, float] = {}  # when fronts that have ended start again, by time.monotonic()
        self._failures = [0] * config.api_server_count  # in a row
        self._unserved = 0  # fronts in a row that ended before they served
        self._signal: int | None = None  # that ends the server
        self._told: Told = StartProgress()  # what all fronts know
        self._error: BaseException | None = None  # what kept the server from starting

    def run(self) -> int:
        """Start the fronts and the engines, pass signals on, and return when all fronts have ended.

        Raises what keeps an engine, or all fronts, from starting.
        """
        os.environ[SHARED] = folder = tempfile.mkdtemp(prefix="jaxserve-metrics-")
        before = {number: signal.signal(number, self._signalled) for number in SIGNALS}
        over, ended = self._spawn.Pipe(duplex=False)
        try:
            for index in range(self._config.api_server_count):
                self._launch(index)
            threading.Thread(target=self._run_engines, args=(ended,), name="jaxserve-start", daemon=True).start()
            while self._alive or self._due:
                told = self._settled
                several = [waited for front in self._alive.values() for waited in front.waited] + (
                    [] if told else [over]
                )
                wait(several, None if told and not self._due else TELLING)
                if not told:
                    self._tell(over.recv() if over.poll() else self._beside.progress)
                self._look_after_fronts()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            del os.environ[SHARED]
            shutil.rmtree(folder, ignore_errors=True)
        if self._error is not None:
            raise self._error
        if self._signal is None:
            return 1
        return 0 if self._settled else 128 + self._signal

    def _run_engines(self, ended: Connection[Any, Any]) -> None:
        """Start the engines, and tell the main thread where they are, or that they are not."""
        told: Told
        try:
            told = tuple(self._beside.run())
        except BaseException as error:
            self._error = error if self._signal is None and self._error is None else self._error
            told = Failure.of(error if isinstance(error, JaxserveError) else JaxserveError(repr(error)))
        with suppress(OSError):  # the main thread has returned
            ended.send(told)

    @property
    def _settled(self) -> bool:
        """Whether the engines have started, or cannot."""
        return not isinstance(self._told, StartProgress)

    def _tell(self, told: Told) -> None:
        if told != self._told:
            self._told = told
            for front in self._alive.values():
                front.tell(told)

    def _launch(self, index: int) -> None:
        theirs, ours = self._spawn.Pipe()
        args = (index, self._config, self._start._replace(over=self._settled), theirs, self._sock)
        process: Any = self._spawn.Process(target=_front, args=args, name=f"jaxserve-front-{index}", daemon=True)
        start_blocked(process, *SIGNALS)
        theirs.close()
        self._alive[index] = front = _Front(process, ours)
        front.tell(self._told)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        self._end(number)

    def _end(self, number: int) -> None:
        """Send a signal to all fronts; none starts again."""
        self._due.clear()
        for front in self._alive.values():
            if front.process.is_alive():
                os.kill(front.process.pid, number)

    def _look_after_fronts(self) -> None:
        """Note which fronts serve or have ended, and start others in the place of those."""
        for index, front in list(self._alive.items()):
            if front.look():
                self._unserved = 0
            if front.process.is_alive():
                continue
            front.process.join()
            front.look()
            front.pipe.close()
            del self._alive[index]
            if self._signal is None and self._error is None:
                self._replace(index, front)
        for index in [index for index, due in self._due.items() if due <= time.monotonic()]:
            del self._due[index]
            self._launch(index)

    def _replace(self, index: int, ended: _Front) -> None:
        """Start another front after a while, or give up if none can serve."""
        lasted = ended.since is not None and time.monotonic() - ended.since > LASTING
        self._failures[index] = 1 if lasted else self._failures[index] + 1
        self._unserved = 0 if ended.since is not None else self._unserved + 1
        why = ended.failure or JaxserveError(f"front {index} ended with exit status {ended.process.exitcode}")
        if all(front.since is None for front in self._alive.values()):
            if ended.failure is not None:
                self._error = ended.failure
            elif self._unserved >= UNSERVED:
                self._error = JaxserveError(f"{self._unserved} fronts ended before they served; the last: {why}")
            if self._error is not None:
                self._end(signal.SIGTERM)
                return
        seconds = pause(self._failures[index])
        logger.error("%s; it starts again in %g s", why, seconds)
        self._due[index] = time.monotonic() + seconds


class _Front:
    """A front process, as its parent sees it. Writer: the main thread."""

    def __init__(self, process: Any, pipe: Connection[Any, Any]) -> None:
        self.process, self.pipe = process, pipe
        self.since: float | None = None  # when it began to serve, by time.monotonic()
        self.failure: JaxserveError | None = None  # what kept it from that
        self._open = True  # it may say more

    @property
    def waited(self) -> list[Any]:
        """What becomes readable when it has ended, or says something."""
        return [self.process.sentinel, self.pipe] if self._open else [self.process.sentinel]

    def look(self) -> bool:
        """Read what it has said, and return whether it has begun to serve."""
        before = self.since
        try:
            while self._open and self.pipe.poll():
                if (said := self.pipe.recv()) is None:
                    self.since = time.monotonic()
                else:
                    self.failure = said.error()
        except (EOFError, OSError):
            self._open = False
        return self.since is not before

    def tell(self, told: Told) -> None:
        with suppress(OSError):  # it has ended
            self.pipe.send(told)


class _Parent:
    """The parent, as a front sees it. Writers: the thread of `places`; the event loop's calls `tell`."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe = pipe
        self.progress = StartProgress()
        self.failed = False  # the parent reports why

    def places(self) -> Sequence[Place]:
        """Wait until the engines are ready, and return their places. Raises what kept one from starting."""
        while isinstance(told := self._pipe.recv(), StartProgress):
            self.progress = told
        if isinstance(told, Failure):
            self.failed = True
            raise told.error()
        places: Sequence[Place] = told
        return places

    def tell(self, failure: Failure | None) -> None:
        """Say that this front serves, or what kept it from that."""
        with suppress(OSError):  # the parent has ended
            self._pipe.send(failure)


def _front(index: int, config: ServeConfig, start: Start, pipe: Connection[Any, Any], sock: socket.socket) -> None:
    """Serve HTTP in this process until a signal says otherwise or the parent ends."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    begin_process(config)
    parent, signals, status = _Parent(pipe), Signals(), 0
    begun = ServerStart(start.last, lambda: parent.progress, start.began)
    door = None if start.over else Door(config, Keys.of(config), begun)

    with signals.handled():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                places, served = partial(in_thread, parent.places), partial(parent.tell, None)
                runner.run(serve_remote(config, door, places, sock, signals, index, served))
        except Interrupted:
            pass
        except JaxserveError as error:
            status = 1
            if not parent.failed:
                parent.tell(Failure.of(error))
        signals.served()
    end_process(status)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        end_process(1)
