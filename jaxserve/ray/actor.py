"""The actor that holds an engine, or one host's part of it, and serves it on a TCP port of its node."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray

from jaxserve.config import ServeConfig
from jaxserve.errors import JaxserveError
from jaxserve.fleet.messages import Failure
from jaxserve.kv.share import KVShare
from jaxserve.report.logs import log_to_stderr
from jaxserve.wire.address import Address
from jaxserve.wire.blocking import Listener

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine
    from jaxserve.engine.startup.spanning import Span
    from jaxserve.fleet.engine_server import EngineServer

THREADS = 4  # methods that may run at a time: `watch` and `follow` wait for the end


class EngineActor:
    """An engine, or a follower of one. Its methods run on threads of their own.

    It starts nothing until it is told to: so Ray may restart its process at once, and the server decides
    when the engine starts again.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self._engine: Engine | None = None
        self._server: EngineServer | None = None
        self._leading: Any = None
        self._listener: Listener | None = None

    def meet(self, key: bytes, processes: int, devices: int) -> Span:
        """Open the ports at which the processes of an instance that spans nodes meet. Called on the leader."""
        from jaxserve.engine.startup.spanning import Span, free_port

        host = ray.util.get_node_ip_address()
        self._listener = Listener(host, key)
        return Span((host, free_port(host)), self._listener.address, key, processes, devices)

    def start(
        self, config: ServeConfig, key: bytes, host: str | None, span: Span | None, kv: KVShare | None
    ) -> str | Failure:
        """Start the engine, and return its address, or what kept it from starting. host: None: this node's.

        kv: how it exchanges KV with other engines.
        """
        log_to_stderr(config.log_level)
        from jaxserve.engine.engine import Engine
        from jaxserve.fleet.engine_server import EngineServer

        try:
            if span is None:
                self._engine = Engine.start(config)
            else:
                from jaxserve.engine.startup.spanning import lead

                assert self._listener is not None
                machine, self._leading = lead(config, span, self._listener)
                self._engine = Engine.on(machine)
            self._server = EngineServer(self._engine, key, kv)
            self._server.on_retired = self._over.set
            return str(self._server.start(Address(host=host or ray.util.get_node_ip_address())))
        except JaxserveError as error:
            return Failure.of(error)

    def follow(self, config: ServeConfig, span: Span, rank: int) -> Failure | None:
        """Be one host of an instance until its leader closes; return what went wrong."""
        log_to_stderr(config.log_level)
        from jaxserve.engine.startup.spanning import serve_follower

        try:
            serve_follower(config, span, rank)
        except JaxserveError as error:
            return Failure.of(error)
        return None

    def watch(self) -> None:
        """Return once a front has asked for a restart, and running requests are done with."""
        self._over.wait()

    def close(self) -> bool:
        """Close the engine; return False if work on its devices does not end."""
        if self._server is not None:
            with suppress(JaxserveError):  # the engine has failed
                self._server.close()
        closed = self._engine is None or self._engine.close()
        if self._leading is not None:
            self._leading.close()
        return closed

    def pid(self) -> int:
        """Return the id of the process; Ray gives an actor that it restarts another one."""
        return os.getpid()

    def leave(self, pid: int) -> None:
        """Close and end the process, so that Ray starts another; nothing if that has happened to process `pid`."""
        if pid == os.getpid():
            self.close()
            logging.shutdown()
            os._exit(0)
