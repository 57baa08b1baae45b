"""The mesh `RxT`: R instances, each on its own mesh of T devices with the single axis `tp`."""

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

FORCED = "xla_force_host_platform_device_count"  # the older flag for emulated devices; jax refuses both together


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """The instances of a mesh, before devices are assigned."""

    instances: int  # R
    tp: int  # T
    roles: tuple[Role, ...]  # one per instance

    @property
    def devices(self) -> int:
        return self.instances * self.tp

    def __str__(self) -> str:
        return f"{self.instances}x{self.tp}"


def plan_mesh(text: str, *, prefill: int | None = None, mode: str = "auto") -> MeshPlan:
    """Parse `RxT` and assign roles by the rules of `ServeConfig`. Raises InvalidValue naming the text."""
    config = ServeConfig(mesh=text, prefill=prefill, mode=mode)  # type: ignore[arg-type]
    instances, tp = parse_mesh(text)
    return MeshPlan(instances, tp, tuple(Role(role) for role in config.roles(instances)))


def plan_of(config: ServeConfig) -> MeshPlan:
    """Return the plan of a configuration; without a mesh, all local accelerators, or 1x1 on CPU."""
    if config.mesh is not None:
        return plan_mesh(config.mesh, prefill=config.prefill, mode=config.mode)
    local = jax.local_devices()
    tp = 1 if local[0].platform == "cpu" else len(local)
    return MeshPlan(1, tp, tuple(Role(role) for role in config.roles(1)))


def sub_meshes(plan: MeshPlan, *, share_devices: bool = False) -> list[Mesh]:
    """Return one mesh per instance.

    On CPU, missing devices are emulated. Elsewhere too few devices are an error, unless
    `share_devices` lets instances share them.
    """
    _emulate(plan)
    devices = jax.devices()
    if len(devices) < plan.devices:
        _refuse(plan, len(devices), devices[0].platform, share_devices)
    grid = [devices[i % len(devices)] for i in range(plan.devices)]
    return [Mesh(np.array(grid[r * plan.tp : (r + 1) * plan.tp]), ("tp",)) for r in range(plan.instances)]


def placed(values: Any, sharding: NamedSharding) -> Any:
    """Place arrays on a mesh.

    If the mesh spans processes, the arrays are numpy arrays, equal in each: `device_put` would make
    all processes of the job compare them first, and wait for everything dispatched before.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(values, sharding)
    return jax.tree.map(lambda array: jax.make_array_from_callback(array.shape, sharding, array.__getitem__), values)


def _emulate(plan: MeshPlan) -> None:
    """Request enough CPU devices before jax starts; no effect on other platforms.

    XLA runs one thread per device. If the devices of an instance communicate, request twice as many:
    with one thread per device, dispatching a step blocks until the previous one has ended (measured
    on 1x2: 18.6 ms of a 20 ms step, against 1 ms).
    """
    wanted = plan.devices if plan.tp == 1 else 2 * plan.devices
    if compat.backend_started() or FORCED in os.environ.get("XLA_FLAGS", ""):
        return
    if jax.distributed.is_initialized():  # only the launcher knows each process's share
        return
    if wanted > max(1, jax.config.jax_num_cpu_devices):  # type: ignore[attr-defined]
        jax.config.update("jax_num_cpu_devices", wanted)
    if plan.devices > 1 and jax.default_backend() == "cpu":
        log.info("emulating %d CPU devices for mesh %s", plan.devices, plan)


def _refuse(plan: MeshPlan, count: int, platform: str, share_devices: bool) -> None:
    if platform != "cpu":
        if share_devices and count >= plan.tp:
            return
        raise InvalidValue(
            f"mesh {plan} needs {plan.devices} devices, but there are {count} ({platform}); use a smaller mesh"
            + ("" if share_devices else ", or --share-devices to let instances share them"),
            "mesh",
        )
    raise InvalidValue(
        f"mesh {plan} needs {plan.devices} devices, but jax has already started with {count} on CPU. Set "
        f"JAX_NUM_CPU_DEVICES={plan.devices} in the environment, or create the engine before other uses of jax",
        "mesh",
    )
