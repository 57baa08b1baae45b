"""Start an engine whose mesh spans processes, one per host: the leader's part, and that of the others.

All processes build the same instance. Then the leader measures and serves, and the others dispatch what
it dispatches (runtime/hosts.py).
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import jax

from jaxserve.config import ServeConfig
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.runtime.hosts import Leading, follow
from jaxserve.engine.startup.assemble import Built, Machine, assemble, build
from jaxserve.errors import InvalidValue
from jaxserve.wire.blocking import Listener, connect


@dataclass(frozen=True)
class Span:
    """The processes of an instance, and where they meet."""

    meeting: tuple[str, int]  # address of jax.distributed, on the leader's host
    leader: tuple[str, int]  # where the leader accepts followers
    key: bytes
    processes: int
    devices: int  # of each process


def free_port(host: str) -> int:
    """Return a port that is free now."""
    with socket.create_server((host, 0)) as sock:
        return int(sock.getsockname()[1])


def join(span: Span, rank: int) -> None:
    """Make this process one of those of the instance. jax must not have started yet.

    Raises InvalidValue if the processes together have another number of devices.
    """
    if os.environ.get("JAX_PLATFORMS") == "cpu" or jax.config.jax_platforms == "cpu":  # type: ignore[attr-defined]
        jax.config.update("jax_num_cpu_devices", span.devices)
    host, port = span.meeting
    jax.distributed.initialize(f"{host}:{port}", span.processes, rank)
    if (devices := jax.device_count()) != span.processes * span.devices:
        raise InvalidValue(
            f"the hosts have {devices} devices together: {span.processes} x {span.devices} are needed", "mesh"
        )


def lead(config: ServeConfig, span: Span, listener: Listener) -> tuple[Machine, Leading]:
    """Build an instance over all processes of `span`, and return it with what tells the followers to end."""
    join(span, 0)
    leading: list[Leading] = []

    def mirrored(built: Built) -> Built:
        (plain,) = built.executors
        leading.append(Leading(plain.state, [listener.accept() for _ in range(span.processes - 1)]))
        listener.close()
        return built._replace(executors=[JaxExecutor(plain.name, leading[0])])

    return assemble(config, through=mirrored), leading[0]


def serve_follower(config: ServeConfig, span: Span, rank: int) -> None:
    """Build the same instance, and dispatch what the leader dispatches until it closes."""
    join(span, rank)
    (executor,) = build(config).executors
    follow(executor.state, connect(span.leader, span.key))
