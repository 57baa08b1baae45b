"""An engine in a process of its own on this machine."""

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
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from jaxserve.config import ServeConfig
from jaxserve.errors import JaxserveError
from jaxserve.remote.address import Address
from jaxserve.remote.messages import Failure
from jaxserve.report.logs import log_to_stderr
from jaxserve.report.progress import bar

log = logging.getLogger(__name__)

CLOSE = "close"
CLOSING = 15.0  # seconds in which an engine must close; then its process is killed


class EngineProcess:
    """A child process with an engine that serves at `address`. Writer: the thread that made it."""

    def __init__(self, config: ServeConfig) -> None:
        """Start the process; `wait` waits until the engine is ready."""
        self._folder = tempfile.mkdtemp(prefix="jaxserve-")  # only this user may enter it
        self.address = Address(path=os.path.join(self._folder, "engine"))
        self.key = secrets.token_bytes(32)
        spawn = multiprocessing.get_context("spawn")  # a fork would copy threads' locks
        self._control, theirs = spawn.Pipe()
        settings = replace(config, api_key=(), admin_key=())  # the keys stay with the front
        self._process: Any = spawn.Process(
            target=_serve, args=(settings, self.address, self.key, theirs), name="jaxserve-engine", daemon=True
        )
        self._process.start()
        theirs.close()

    def wait(self) -> None:
        """Wait until the engine is ready. Raises what kept it from starting."""
        try:
            failure = self._control.recv()
        except EOFError:
            self._process.join(CLOSING)
            raise JaxserveError(f"the engine's process ended while it started ({self.end})") from None
        if failure is not None:
            self.close()
            raise failure.error()

    @property
    def end(self) -> str:
        """How the process ended."""
        code = self._process.exitcode
        if code is None:
            return "it still runs"
        return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def close(self) -> bool:
        """Close the engine and end its process; return False if it had to be killed."""
        with suppress(OSError):  # it has ended
            self._control.send(CLOSE)
        self._process.join(CLOSING)
        killed = self._process.is_alive()
        if killed:
            log.error("the engine's process did not end within %g s and is killed", CLOSING)
            self._process.kill()
            self._process.join()
        shutil.rmtree(self._folder, ignore_errors=True)
        return not killed


def _serve(config: ServeConfig, address: Address, key: bytes, control: Connection[Any, Any]) -> None:
    """Start an engine, serve it until the parent says so or ends, and end this process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent drains, then says when to close
        signal.signal(number, signal.SIG_IGN)
    log_to_stderr(config.log_level)
    over = threading.Event()
    ready = threading.Event()
    threading.Thread(target=_watch, args=(control, ready, over), name="jaxserve-parent", daemon=True).start()
    from jaxserve.engine.engine import Engine  # imports jax
    from jaxserve.remote.server import EngineServer

    try:
        with bar("warming up") as progress:
            engine = Engine.start(config, progress=progress)
        server = EngineServer(engine, key)
        server.start(address)
    except JaxserveError as error:
        control.send(Failure.of(error))
        over.wait()
        return
    ready.set()
    control.send(None)
    over.wait()
    with suppress(JaxserveError):  # the engine has failed
        server.close()
    _leave(0 if engine.close() else 1)


def _watch(control: Connection[Any, Any], ready: threading.Event, over: threading.Event) -> None:
    """Set `over` once the parent says so or ends; leave at once if the engine has not even started."""
    try:
        control.recv()
    except (EOFError, OSError):
        if not ready.is_set():
            _leave(1)
    over.set()


def _leave(status: int) -> None:
    """End the process at once: threads that wait for devices could keep the interpreter from exiting."""
    logging.shutdown()
    os._exit(status)
