"""`RxT`: R instances, each on its own mesh of T devices with the one axis `tp`."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxserve.config import ServeConfig, parse_mesh
from jaxserve.engine.programs import compat
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.policy import Role

log = logging.getLogger(__name__)

FORCED = "xla_force_host_platform_device_count"  # the older way to emulate devices; jax refuses both together


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """Which instances there are, before there are devices."""

    instances: int  # R
    tp: int  # T
    roles: tuple[Role, ...]  # one per instance

    @property
    def devices(self) -> int:
        return self.instances * self.tp

    def __str__(self) -> str:
        return f"{self.instances}x{self.tp}"


def plan_mesh(text: str, *, prefill: int | None = None, mode: str = "auto") -> MeshPlan:
    """`RxT` with the role of each instance; see `ServeConfig` for the rules. Raises InvalidValue naming the text."""
    config = ServeConfig(mesh=text, prefill=prefill, mode=mode)  # type: ignore[arg-type]
    instances, tp = parse_mesh(text)
    return MeshPlan(instances, tp, tuple(Role(role) for role in config.roles(instances)))


def plan_of(config: ServeConfig) -> MeshPlan:
    """The plan a configuration asks for. Without a mesh: one instance on all local accelerators, 1x1 on CPU."""
    if config.mesh is not None:
        return plan_mesh(config.mesh, prefill=config.prefill, mode=config.mode)
    local = jax.local_devices()
    tp = 1 if local[0].platform == "cpu" else len(local)
    return MeshPlan(1, tp, tuple(Role(role) for role in config.roles(1)))


def sub_meshes(plan: MeshPlan, *, share_devices: bool = False) -> list[Mesh]:
    """One mesh per instance. On CPU missing devices are emulated; elsewhere too few of them are an error, unless
    `share_devices` lets instances lie on the same ones."""
    _emulate(plan)
    devices = jax.devices()
    if len(devices) < plan.devices:
        _refuse(plan, len(devices), devices[0].platform, share_devices)
    grid = [devices[i % len(devices)] for i in range(plan.devices)]
    return [Mesh(np.array(grid[r * plan.tp : (r + 1) * plan.tp]), ("tp",)) for r in range(plan.instances)]


def placed(values: Any, sharding: NamedSharding) -> Any:
    """Arrays on a mesh. Where it spans processes they are of numpy, and each has the same ones: `device_put` would have
    all processes of the job compare them first, and wait for all that was dispatched before."""
    if sharding.is_fully_addressable:
        return jax.device_put(values, sharding)
    return jax.tree.map(lambda one: jax.make_array_from_callback(one.shape, sharding, one.__getitem__), values)


def _emulate(plan: MeshPlan) -> None:
    """Ask for enough CPU devices while jax still listens; harmless where the devices turn out to be others.

    XLA runs one thread per device. Where the devices of an instance wait for each other, it gets as many again:
    with a thread for each device only, dispatching a step blocks until the one before it has ended (measured on
    1x2: 18.6 ms of a 20 ms step, against 1 ms).
    """
    wanted = plan.devices if plan.tp == 1 else 2 * plan.devices
    if compat.backend_started() or FORCED in os.environ.get("XLA_FLAGS", ""):
        return
    if jax.distributed.is_initialized():  # each process has a share of them, which only its launcher knows
        return
    if wanted > max(1, jax.config.jax_num_cpu_devices):  # type: ignore[attr-defined]
        jax.config.update("jax_num_cpu_devices", wanted)
    if plan.devices > 1 and jax.default_backend() == "cpu":
        log.info("emulating %d CPU devices for mesh %s", plan.devices, plan)


def _refuse(plan: MeshPlan, found: int, platform: str, share_devices: bool) -> None:
    if platform != "cpu":
        if share_devices and found >= plan.tp:
            return
        raise InvalidValue(
            f"mesh {plan} needs {plan.devices} devices and there are {found} ({platform}); use a smaller mesh"
            + ("" if share_devices else ", or --share-devices to let instances share them"),
            "mesh",
        )
    raise InvalidValue(
        f"mesh {plan} needs {plan.devices} devices; jax has already started with {found} on CPU. Set "
        f"JAX_NUM_CPU_DEVICES={plan.devices} in the environment, or make the engine before other uses of jax",
        "mesh",
    )
