"""Engines in processes of their own on this machine, which are started again if they end unexpectedly."""

from __future__ import annotations

import logging
import multiprocessing
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, NoReturn

from jaxserve.config import ServeConfig
from jaxserve.engine.runtime.gc_control import uncollected
from jaxserve.engine.startup.environment import gpus_here
from jaxserve.errors import JaxserveError
from jaxserve.fleet.messages import Failure
from jaxserve.fleet.nodes import visible
from jaxserve.fleet.supervisor import CLOSING, POLL, Closing, Engines, own_settings
from jaxserve.kv.share import KVShare
from jaxserve.report.logs import log_to_stderr
from jaxserve.report.progress import bar
from jaxserve.report.start import StartProgress
from jaxserve.wire.address import Address, Place

log = logging.getLogger(__name__)

CUDA = "CUDA_VISIBLE_DEVICES"
CLOSE = "close"
TELLING = 0.1  # seconds between two reports of progress to the parent, at least
BEAT = 5.0  # seconds between two signs of life
HUNG = 300  # looks in a row without one, POLL seconds apart, after which a process is killed
RETIRED = 3  # exit status of an engine that a front has asked to start again


class EngineOrders(NamedTuple):
    """What an engine in a process of its own is, and where it serves."""

    config: ServeConfig
    place: Place
    gpus: str | None = None  # see nodes.py
    share: KVShare | None = None  # how it exchanges KV with others; None: it does not


class EngineProcess:
    """A child process with an engine. `close` may be called while another thread waits."""

    def __init__(self) -> None:
        """Start the process, which imports what an engine needs; `begin` says what it serves."""
        spawn = multiprocessing.get_context("spawn")  # a fork would copy threads' locks
        self._control, theirs = spawn.Pipe()
        process: Any = spawn.Process(target=_serve, args=(theirs,), name="jaxserve-engine")
        process.daemon = True
        self._process = process
        self._reaping = threading.Lock()  # the exit status can be collected once
        self._ready = False
        self._silent = 0  # looks since the last sign of life: not a time, as this process may have stood still itself
        start_blocked(process, signal.SIGINT)  # it ignores Ctrl-C
        theirs.close()
        self.pid: int = process.pid
        self.sentinel: int = process.sentinel  # readable once the process has ended

    def begin(self, orders: EngineOrders) -> None:
        """Start the engine; `wait` waits until it is ready."""
        with suppress(OSError):  # the process has ended, as `wait` will say
            self._control.send(orders)

    def wait(self, told: Callable[[StartProgress], None] = lambda progress: None) -> None:
        """Wait until the engine is ready; `told` gets its progress. Raises what kept it from starting."""
        try:
            while isinstance(said := self._control.recv(), StartProgress):
                told(said)
        except (EOFError, OSError):  # the latter if it had not read all when it was killed
            self.join()
            raise JaxserveError(f"the engine's process ended while it started ({self.end})") from None
        if said is not None:
            self.close()
            raise said.error()
        self._ready = True

    def look(self) -> bool:
        """Wait a moment, and return whether the process has ended. One that hangs is killed."""
        seen = wait([self.sentinel, self._control], timeout=POLL)
        if self._control in seen:
            try:
                self._control.recv()
            except (EOFError, OSError):
                return self.join()
            self._silent = 0
        elif not seen:
            self._silent += 1
            if self._silent > HUNG:
                log.error("the engine's process has not responded for %g s and is killed", HUNG * POLL)
                self._process.kill()
        return self.sentinel in seen

    @property
    def end(self) -> str:
        """How the process ended."""
        if self._silent > HUNG:
            return f"it had not responded for {HUNG * POLL:g} s"
        with self._reaping:
            code = self._process.exitcode
        if code is None:
            return "it still runs"
        return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    @property
    def retired(self) -> bool:
        """Whether the process has ended because a front has asked for a restart."""
        with self._reaping:
            return bool(self._process.exitcode == RETIRED)

    def close(self) -> bool:
        """Close the engine and end its process; return False if it had to be killed.

        An engine that is not ready has nothing to lose, and its process, which may still import, none to close.
        """
        if not self._ready:
            self._process.kill()
        else:
            with suppress(OSError):  # it has ended
                self._control.send(CLOSE)
        ended = self.join()
        if not ended:
            log.error("the engine's process did not end within %g s and is killed", CLOSING)
            self._process.kill()
            self.join()
        return ended

    def join(self) -> bool:
        """Wait up to CLOSING seconds for the end of the process, and return whether it came."""
        with self._reaping:
            self._process.join(CLOSING)
            return not self._process.is_alive()


class LocalReplica:
    """A Replica in a child process."""

    def __init__(self, orders: EngineOrders, ahead: EngineProcess | None = None) -> None:
        """ahead: a process that has not begun, for the first start."""
        self.place = orders.place
        self.progress = StartProgress()
        self._orders = orders
        self._ahead = ahead
        self._process: EngineProcess | None = None
        self._lock = threading.Lock()  # between the start of a process and `close`
        self._closed = False

    @property
    def pid(self) -> int:
        """The id of the process. Call it while the engine runs."""
        assert self._process is not None
        return self._process.pid

    def launch(self) -> EngineProcess:
        """Start the process, unless it has been, without waiting for the engine."""
        with self._lock:
            if self._closed:
                raise JaxserveError("the server closes")
            if self._process is None:
                self.place.address.vacate()
                self._process, self._ahead = self._ahead or EngineProcess(), None
                self._process.begin(self._orders)
            return self._process

    def start(self, closing: Closing) -> None:
        self.progress = StartProgress()
        self.launch().wait(self._keep_progress)

    def _keep_progress(self, progress: StartProgress) -> None:
        self.progress = progress

    def ended(self, closing: Closing) -> str | None:
        process = self._process
        assert process is not None
        while not process.look():
            if closing():
                return None
        process.join()  # its sentinel is readable a moment before its exit status
        return "" if process.retired else process.end

    def stop(self, *, keep: bool) -> None:
        if self._process is not None:
            self._process.close()
        with self._lock:
            self._process = None
        self.place.address.vacate()

    def close(self) -> bool:
        with self._lock:
            self._closed, process = True, self._process
        return process is None or process.close()


class EngineProcesses(Engines):
    """The engines of a server in processes of this machine."""

    def __init__(self, config: ServeConfig, ahead: EngineProcess | None = None) -> None:
        """Start the processes; `wait` waits until all engines are ready.

        ahead: a process for the first of them, which has not begun. Raises InvalidValue if there are too few GPUs.
        """
        super().__init__(len(config.replica_roles))
        gpus = visible(config, gpus_here(), os.environ.get(CUDA))
        self._folder = tempfile.mkdtemp(prefix="jaxserve-")  # only this user may enter it
        replicas = []
        for at, (own, share) in enumerate(zip(gpus, KVShare.each(config), strict=True)):
            name = f"replica {at}" if len(gpus) > 1 else "the engine process"
            place = Place(Address(path=os.path.join(self._folder, str(at))), secrets.token_bytes(32), name)
            orders = EngineOrders(own_settings(config, at), place, own, share)
            replicas.append(LocalReplica(orders, None if at else ahead))
        self._keep(replicas)
        for replica in replicas[: self.begin]:
            replica.launch()

    def close(self) -> bool:
        closed = super().close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return closed


def start_blocked(process: Any, *signals: int) -> None:
    """Start a process that inherits that these signals wait, and lets them in when it can handle them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(control: Connection[Any, Any]) -> None:
    """Start the engine that the parent orders, serve it until the parent says so or ends, and end this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    with uncollected():  # a seventh of the time of the imports
        from jaxserve.engine.engine import Engine  # imports jax
        from jaxserve.fleet.engine_server import EngineServer
    try:
        config, place, gpus, share = control.recv()
    except (EOFError, OSError):  # the parent has ended
        _leave(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from now on the parent drains, then says when to close
    if gpus is not None:
        os.environ[CUDA] = gpus  # before jax starts
    log_to_stderr(config.log_level)
    over, ready, retired = threading.Event(), threading.Event(), threading.Event()
    threading.Thread(target=_watch, args=(control, ready, over), name="jaxserve-parent", daemon=True).start()

    parent = _Parent(control)
    try:
        with bar("warming up") as drawn:

            def progress(done: int, total: int, label: str) -> None:
                drawn(done, total, label)
                parent.tell(StartProgress.of(done, total, label))

            engine = Engine.start(config, progress=progress)
        server = EngineServer(engine, place.key, share)

        def leave() -> None:
            retired.set()
            over.set()

        server.on_retired = leave
        server.start(place.address)
    except JaxserveError as error:
        parent.end(Failure.of(error))
        over.wait()
        return
    ready.set()
    parent.end(None)
    while not over.wait(BEAT):
        if engine.silence() < BEAT:
            parent.beat()
    with suppress(JaxserveError):  # the engine has failed
        server.close()
    closed = engine.close()
    _leave(RETIRED if retired.is_set() else 0 if closed else 1)


class _Parent:
    """The parent of an engine's process, which waits for the engine. Writers: threads that report progress."""

    def __init__(self, control: Connection[Any, Any]) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._next = 0.0  # when progress may be told again
        self._ended = False  # the start is over

    def tell(self, progress: StartProgress) -> None:
        """Report progress, unless that has just been done."""
        with self._lock:
            if not self._ended and (progress.done == progress.total or time.monotonic() >= self._next):
                self._next = time.monotonic() + TELLING
                with suppress(OSError):  # the parent has ended, which `_watch` sees too
                    self._control.send(progress)

    def end(self, failure: Failure | None) -> None:
        """Say that the engine is ready, or what kept it from starting."""
        with self._lock:
            self._ended = True
            self._control.send(failure)

    def beat(self) -> None:
        with suppress(OSError):
            self._control.send(None)


def _watch(control: Connection[Any, Any], ready: threading.Event, over: threading.Event) -> None:
    """Set `over` once the parent says so or ends; leave at once if the engine has not even started."""
    with suppress(EOFError, OSError):
        control.recv()
    if not ready.is_set():
        _leave(1)
    over.set()


def _leave(status: int) -> NoReturn:
    """End the process at once: threads that wait for devices could keep the interpreter from exiting."""
    logging.shutdown()
    os._exit(status)
