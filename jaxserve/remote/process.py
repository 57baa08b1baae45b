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
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from jaxserve.config import ServeConfig
from jaxserve.engine.startup.environment import gpus_here
from jaxserve.errors import JaxserveError
from jaxserve.remote.address import Address, Place
from jaxserve.remote.devices import visible
from jaxserve.remote.engines import CLOSING, LASTING, own_settings, pause
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


class EngineProcesses:
    """The engines of a server, one per replica. An engine that ends is started again at the same place."""

    def __init__(self, config: ServeConfig) -> None:
        """Start the processes; `wait` waits until all engines are ready.

        Raises InvalidValue if there are too few GPUs.
        """
        gpus = visible(config, gpus_here(), os.environ.get(CUDA))
        self._folder = tempfile.mkdtemp(prefix="jaxserve-")  # only this user may enter it
        roles, several = config.replica_roles, len(config.replica_roles) > 1
        self.places = tuple(
            Place(
                Address(path=os.path.join(self._folder, str(at))),
                secrets.token_bytes(32),
                f"replica {at}" if several else "the engine process",
            )
            for at in range(len(roles))
        )
        configs = [own_settings(config, at) for at in range(len(roles))]
        key = secrets.token_bytes(32)
        shares = [KVShare(key, role, config.kv_transfer) if config.prefill_replicas else None for role in roles]
        self._own = list(zip(configs, self.places, gpus, shares, strict=True))  # arguments of each EngineProcess
        self._processes = [EngineProcess(*own) for own in self._own]
        self._lock = threading.Lock()  # between the start of an engine and `close`
        self._closing = threading.Event()

    def wait(self) -> None:
        """Wait until all engines are ready. Raises what kept one from starting."""
        for process in self._processes:
            process.wait()
        for at in range(len(self._processes)):
            threading.Thread(target=self._keep, args=(at,), name=f"jaxserve-keeper-{at}", daemon=True).start()

    def close(self) -> bool:
        """Close all engines; return False if one had to be killed."""
        with self._lock:
            self._closing.set()
        closed = [process.close() for process in self._processes]
        shutil.rmtree(self._folder, ignore_errors=True)
        return all(closed)

    def _keep(self, at: int) -> None:
        """Start an engine again whenever it has ended. Writer of its process, until `close`."""
        failures, begun, name = 0, time.monotonic(), self.places[at].name
        while True:
            while not wait([self._processes[at].sentinel], timeout=0.2):
                if self._closing.is_set():
                    return
            self._processes[at].join()  # its sentinel is readable a moment before its exit status
            if self._processes[at].retired:
                failures = 0
                log.info("%s starts again, as asked", name)
            else:
                failures = 1 if time.monotonic() - begun > LASTING else failures + 1
                log.error("%s ended (%s); it starts again in %g s", name, self._processes[at].end, pause(failures))
            if self._closing.wait(pause(failures)):
                return
            self.places[at].address.vacate()
            with self._lock:
                if self._closing.is_set():
                    return
                self._processes[at].close()
                self._processes[at] = EngineProcess(*self._own[at])
            begun = time.monotonic()
            try:
                self._processes[at].wait()
            except JaxserveError as error:
                log.error("%s did not start: %s", name, error)
            else:
                log.info("%s serves again", name)


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
