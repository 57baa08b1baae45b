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
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from jaxserve.config import ServeConfig
from jaxserve.engine.startup.environment import gpus_here
from jaxserve.errors import JaxserveError
from jaxserve.remote.address import Address, Place
from jaxserve.remote.devices import visible
from jaxserve.remote.engines import CLOSING, POLL, Closing, Engines, own_settings
from jaxserve.remote.kv_share import KVShare
from jaxserve.remote.messages import Failure
from jaxserve.report.logs import log_to_stderr
from jaxserve.report.progress import bar

log = logging.getLogger(__name__)

CUDA = "CUDA_VISIBLE_DEVICES"
CLOSE = "close"
RETIRED = 3  # exit status of an engine that a front has asked to start again


class EngineProcess:
    """A child process with an engine. `close` may be called while another thread waits."""

    def __init__(
        self, config: ServeConfig, place: Place, gpus: str | None = None, share: KVShare | None = None
    ) -> None:
        """Start the process; `wait` waits until the engine is ready.

        gpus: see devices.py. share: how it exchanges KV with others; None: it does not.
        """
        spawn = multiprocessing.get_context("spawn")  # a fork would copy threads' locks
        self._control, theirs = spawn.Pipe()
        process: Any = spawn.Process(
            target=_serve, args=(config, place, gpus, share, theirs), name=f"jaxserve-{place.name}"
        )
        process.daemon = True
        self._process = process
        self._reaping = threading.Lock()  # the exit status can be collected once
        process.start()
        theirs.close()
        self.pid: int = process.pid
        self.sentinel: int = process.sentinel  # readable once the process has ended

    def wait(self) -> None:
        """Wait until the engine is ready. Raises what kept it from starting."""
        try:
            failure = self._control.recv()
        except EOFError:
            self.join()
            raise JaxserveError(f"the engine's process ended while it started ({self.end})") from None
        if failure is not None:
            self.close()
            raise failure.error()

    @property
    def end(self) -> str:
        """How the process ended."""
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
        """Close the engine and end its process; return False if it had to be killed."""
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

    def __init__(self, config: ServeConfig, place: Place, gpus: str | None, share: KVShare | None) -> None:
        self.place = place
        self._own = config, place, gpus, share  # arguments of each EngineProcess
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
                self._process = EngineProcess(*self._own)
            return self._process

    def start(self, closing: Closing) -> None:
        self.launch().wait()

    def ended(self, closing: Closing) -> str | None:
        process = self._process
        assert process is not None
        while not wait([process.sentinel], timeout=POLL):
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

    def __init__(self, config: ServeConfig) -> None:
        """Start the processes; `wait` waits until all engines are ready.

        Raises InvalidValue if there are too few GPUs.
        """
        super().__init__(len(config.replica_roles))
        gpus = visible(config, gpus_here(), os.environ.get(CUDA))
        self._folder = tempfile.mkdtemp(prefix="jaxserve-")  # only this user may enter it
        replicas = [
            LocalReplica(own_settings(config, at), self._place(at, len(gpus) > 1), *own)
            for at, own in enumerate(zip(gpus, KVShare.each(config), strict=True))
        ]
        self._keep(replicas)
        for one in replicas[: self.begin]:
            one.launch()

    def _place(self, at: int, several: bool) -> Place:
        address = Address(path=os.path.join(self._folder, str(at)))
        return Place(address, secrets.token_bytes(32), f"replica {at}" if several else "the engine process")

    def close(self) -> bool:
        closed = super().close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return closed


def _serve(
    config: ServeConfig, place: Place, gpus: str | None, share: KVShare | None, control: Connection[Any, Any]
) -> None:
    """Start an engine, serve it until the parent says so or ends, and end this process."""
    if gpus is not None:
        os.environ[CUDA] = gpus  # before jax is imported
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent drains, then says when to close
        signal.signal(number, signal.SIG_IGN)
    log_to_stderr(config.log_level)
    over, ready, retired = threading.Event(), threading.Event(), threading.Event()
    threading.Thread(target=_watch, args=(control, ready, over), name="jaxserve-parent", daemon=True).start()
    from jaxserve.engine.engine import Engine  # imports jax
    from jaxserve.remote.server import EngineServer

    try:
        with bar("warming up") as progress:
            engine = Engine.start(config, progress=progress)
        server = EngineServer(engine, place.key, share)

        def leave() -> None:
            retired.set()
            over.set()

        server.on_retired = leave
        server.start(place.address)
    except JaxserveError as error:
        control.send(Failure.of(error))
        over.wait()
        return
    ready.set()
    control.send(None)
    over.wait()
    with suppress(JaxserveError):  # the engine has failed
        server.close()
    closed = engine.close()
    _leave(RETIRED if retired.is_set() else 0 if closed else 1)


def _watch(control: Connection[Any, Any], ready: threading.Event, over: threading.Event) -> None:
    """Set `over` once the parent says so or ends; leave at once if the engine has not even started."""
    with suppress(EOFError, OSError):
        control.recv()
    if not ready.is_set():
        _leave(1)
    over.set()


def _leave(status: int) -> None:
    """End the process at once: threads that wait for devices could keep the interpreter from exiting."""
    logging.shutdown()
    os._exit(status)
