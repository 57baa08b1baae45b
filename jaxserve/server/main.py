"""Start a server from its settings: one process, or fronts beside the process of the engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from jaxserve.config import ServeConfig
from jaxserve.engine.runtime.kv_events import check_events
from jaxserve.errors import InvalidValue
from jaxserve.models.source import find_tokenizer
from jaxserve.remote.engines import Engines
from jaxserve.remote.process import EngineProcesses
from jaxserve.remote.scaler import ReplicaScaler
from jaxserve.report.progress import bar
from jaxserve.server.fronts import Fronts, begin_process, serve_remote
from jaxserve.server.keys import Keys, warn_if_open
from jaxserve.server.limits import load_limits
from jaxserve.server.service import Service
from jaxserve.server.serving import listen_on, loop_factory, serve
from jaxserve.server.signals import Signals, end_process
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
            return _run_alone(config, sock)
        return _run_beside(config, sock, start)
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


def _run_alone(config: ServeConfig, sock: socket.socket) -> int:
    """Serve with the engine in this process."""
    service, signals = start_service(config), Signals()
    with signals.handled():
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(serve(service, sock, signals=signals))
        finally:
            signals.served()
            service.close()
            if not service.engine.close():
                end_process(1)
    return 0


def _run_beside(config: ServeConfig, sock: socket.socket, start: Callable[[ServeConfig], Engines]) -> int:
    """Serve with every engine in a process of its own."""
    engines = start(config)
    scaler = None if config.max_replicas is None else ReplicaScaler(engines, config)
    try:
        tokenizer = find_tokenizer(config) if config.api_server_count == 1 else None
        engines.wait()
        if scaler is not None:
            scaler.start()
        if tokenizer is None:
            return Fronts(config, engines.places, sock).run()
        signals = Signals()
        with signals.handled():
            try:
                with asyncio.Runner(loop_factory=loop_factory()) as runner:
                    runner.run(serve_remote(config, tokenizer, engines.places, sock, signals))
            finally:
                signals.served()
    finally:
        if scaler is not None:
            scaler.close()
        if not engines.close():
            end_process(1)
    return 0


def start_service(config: ServeConfig) -> Service:
    """Load the tokenizer and start the engine in parallel, with a progress bar."""
    from jaxserve.engine.engine import Engine  # imported late: it imports jax

    with ThreadPoolExecutor(1) as beside, bar("warming up") as progress:
        tokenizer = beside.submit(find_tokenizer, config)
        engine = Engine.start(config, progress=progress)
    try:
        return Service(engine, tokenizer.result(), config)
    except Exception:
        engine.close()
        raise
