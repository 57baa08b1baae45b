"""The processes that serve HTTP for an engine in another one.

Fronts share one listening socket; the system gives each new connection to one of them. A front that
ends unexpectedly loses its open connections, and another one replaces it.
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
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

import prometheus_client

from jaxserve.config import ServeConfig
from jaxserve.models.source import find_tokenizer
from jaxserve.remote.address import Place
from jaxserve.remote.replicas import Replicas
from jaxserve.report.logs import log_to_stderr
from jaxserve.server.metrics import SHARED
from jaxserve.server.service import Service
from jaxserve.server.serving import loop_factory, serve
from jaxserve.server.signals import Signals, end_process
from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger("jaxserve.server")

SOONEST = 1.0  # seconds: a front that ends earlier than this after its start is not replaced


def begin_process(config: ServeConfig) -> None:
    """Set up logging and metrics of a process that serves HTTP."""
    log_to_stderr(config.log_level)
    quieter: Callable[[], None] = prometheus_client.disable_created_metrics
    quieter()  # drop the `_created` series beside each counter


async def serve_remote(
    config: ServeConfig,
    tokenizer: Tokenizer,
    places: Sequence[Place],
    sock: socket.socket,
    signals: Signals,
    index: int = 0,
) -> None:
    """Serve HTTP for the engines at `places` until shutdown; `index` is that of this front."""
    # Requests of two fronts must not share seeds: equal prompts would get equal samples.
    seed = f"{config.seed}.{index}" if index else str(config.seed)
    engine = await Replicas.connect(
        places, seed, config.replica_routing, config.api_server_count, partly=config.max_replicas is not None
    )
    service = Service(engine, tokenizer, config)
    engine.on_continued = service.metrics.continued
    try:
        await serve(service, sock, signals=signals)
    finally:
        service.close()
        engine.close()


class Fronts:
    """Several front processes. Writer: the main thread."""

    def __init__(self, config: ServeConfig, places: Sequence[Place], sock: socket.socket) -> None:
        self._config, self._places, self._sock = config, places, sock
        self._spawn = multiprocessing.get_context("spawn")
        self._alive: dict[int, tuple[Any, float]] = {}  # index -> (process, when it started)
        self._ending = False

    def run(self) -> int:
        """Start the fronts, pass signals on to them, and return when all have ended."""
        os.environ[SHARED] = folder = tempfile.mkdtemp(prefix="jaxserve-metrics-")
        before = {number: signal.signal(number, self._signalled) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            for index in range(self._config.api_server_count):
                self._start(index)
            while self._alive:
                wait([process.sentinel for process, _ in self._alive.values()])
                self._replace_ended()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            shutil.rmtree(folder, ignore_errors=True)
        return 0 if self._ending else 1

    def _start(self, index: int) -> None:
        args = (index, self._config, self._places, self._sock)
        process: Any = self._spawn.Process(target=_front, args=args, name=f"jaxserve-front-{index}", daemon=True)
        process.start()
        self._alive[index] = process, time.monotonic()

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._ending = True
        for process, _ in self._alive.values():
            if process.is_alive():
                os.kill(process.pid, number)

    def _replace_ended(self) -> None:
        for index, (process, started) in list(self._alive.items()):
            if process.is_alive():
                continue
            process.join()
            del self._alive[index]
            if self._ending:
                continue
            logger.error("front %d ended with exit status %s", index, process.exitcode)
            if time.monotonic() - started > SOONEST:
                self._start(index)


def _front(index: int, config: ServeConfig, places: Sequence[Place], sock: socket.socket) -> None:
    """Serve HTTP in this process until a signal says otherwise or the parent ends."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    begin_process(config)
    tokenizer, signals = find_tokenizer(config), Signals()
    with signals.handled():
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve_remote(config, tokenizer, places, sock, signals, index))
        signals.served()
    end_process(0)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        end_process(1)
