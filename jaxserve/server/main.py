"""Start a server from its settings: one process, or fronts beside the process of the engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from jaxserve.config import ServeConfig
from jaxserve.engine.runtime.kv_events import check_events
from jaxserve.errors import InvalidValue
from jaxserve.fleet.processes import EngineProcesses
from jaxserve.fleet.supervisor import Engines
from jaxserve.models.source import find_tokenizer
from jaxserve.report.progress import Callback, bar
from jaxserve.report.start import StartProgress
from jaxserve.server.beside import Beside, in_thread
from jaxserve.server.door import Door, ServerStart
from jaxserve.server.fronts import Fronts, begin_process, serve_remote
from jaxserve.server.keys import Keys, warn_if_open
from jaxserve.server.limits import load_limits
from jaxserve.server.service import Service
from jaxserve.server.serving import Interrupted, announce, listen_on, loop_factory, serve_from_start
from jaxserve.server.signals import Signals, end_process
from jaxserve.server.start_times import StartTime, last_start, remember
from jaxserve.server.tls import check_tls
from jaxserve.server.tracing import check_tracing


def run(config: ServeConfig, start: Callable[[ServeConfig], Engines] = EngineProcesses) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit status.

    SIGTERM lets running requests finish first; SIGINT aborts them. start: starts the engines of a server
    that has them in other processes.
    """
    begin_process(config)
    keys = Keys.of(config)  # report unreadable files and a port in use before minutes of loading
    warn_if_open(config, keys)
    load_limits(config, keys.names)
    check_processes(config, keys)
    check_tls(config)
    check_tracing(config)
    if config.kv_events is not None:
        check_events(config.kv_events)
    sock = listen_on(config.host, config.port)
    try:
        if config.api_server_count == 0:
            return _run_alone(config, keys, sock)
        return _run_beside(config, keys, sock, start)
    finally:
        sock.close()


def check_processes(config: ServeConfig, keys: Keys) -> None:
    """Raise InvalidValue if the settings need other processes than they ask for."""
    if (config.most_replicas > 1 or config.ray is not None) and config.api_server_count == 0:
        what = config.replicas_said if config.ray is None else f"engines in Ray (ray={config.ray!r})"
        raise InvalidValue(f"{what} are processes of their own: use --api-server-count 1 or more", "replicas")
    if config.api_server_count > 1 and len(keys.names) > 1:
        raise InvalidValue(
            f"api_server_count={config.api_server_count} with {len(keys.names)} API keys: limits and fairness among "
            "keys need one front: use --api-server-count 1",
            "api_server_count",
        )


def _run_alone(config: ServeConfig, keys: Keys, sock: socket.socket) -> int:
    """Serve with the engine in this process, which a thread starts while the port is open."""
    reached, services = [StartProgress()], list[Service]()

    def told(done: float, total: float, label: str = "") -> None:
        reached[0] = StartProgress.of(done, total, label)

    async def make() -> Service:
        services.append(await in_thread(lambda: start_service(config, told)))
        remember(config, StartTime(start.elapsed, services[0].engine.stats().compilations))
        return services[0]

    start = ServerStart(last_start(config), lambda: reached[0])
    door, signals = Door(config, keys, start), Signals()
    opened = partial(announce, config, start.last, sock)
    with signals.handled():
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(serve_from_start(door, config, sock, make, signals=signals, opened=opened))
        except Interrupted as end:
            end_process(128 + end.number)  # the thread that starts the engine cannot be stopped
        finally:
            signals.served()
            for service in services:
                service.close()
                if not service.engine.close():
                    end_process(1)
    return 0


def _run_beside(config: ServeConfig, keys: Keys, sock: socket.socket, start: Callable[[ServeConfig], Engines]) -> int:
    """Serve with every engine in a process of its own, which a thread starts while the port is open."""
    beside = Beside(config, start)
    try:
        if config.api_server_count > 1:
            return Fronts(config, beside, sock).run()
        door, signals = Door(config, keys, ServerStart(last_start(config), lambda: beside.progress)), Signals()
        with signals.handled():
            try:
                with asyncio.Runner(loop_factory=loop_factory()) as runner:
                    runner.run(serve_remote(config, door, lambda: in_thread(beside.run), sock, signals))
            except Interrupted as end:
                return 128 + end.number
            finally:
                signals.served()
    finally:
        if not beside.close():
            end_process(1)
    return 0


def start_service(config: ServeConfig, told: Callback = lambda done, total, label="": None) -> Service:
    """Load the tokenizer and start the engine in parallel, with a progress bar; `told` gets the progress too."""
    from jaxserve.engine.engine import Engine  # imported late: it imports jax

    with ThreadPoolExecutor(1) as beside, bar("warming up") as drawn:

        def progress(done: int, total: int, label: str) -> None:
            drawn(done, total, label)
            told(done, total, label)

        tokenizer = beside.submit(find_tokenizer, config)
        engine = Engine.start(config, progress=progress)
    try:
        return Service(engine, tokenizer.result(), config)
    except Exception:
        engine.close()
        raise
