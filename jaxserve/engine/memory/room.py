"""The memory of the machine and of its devices, and whether a model's weights fit at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.errors import InvalidValue
from jaxserve.models.layers import is_info
from jaxserve.models.registry import abstract_weights
from jaxserve.models.spec import ModelSpec

# Limit and use of the process's control group, version 2 and 1.
GROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def free_memory() -> int:
    """Return the bytes available without swapping, within the control group's limit if there is one."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with suppress(OSError, KeyError):
        free = _known()["MemAvailable"]
    for limit, used in GROUPS:
        with suppress(OSError, ValueError):
            free = min(free, max(0, _of_group(limit) - _of_group(used)))
    return free


def whole_memory() -> int:
    """Return the bytes of memory and swap, within the control group's limit if there is one."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, KeyError):
        whole += _known()["SwapTotal"]
    for limit, _ in GROUPS:
        with suppress(OSError, ValueError):
            whole = min(whole, _of_group(limit))
    return whole


def weight_bytes(spec: ModelSpec, dtype: Any, tp: int) -> int:
    """Return the bytes of a model's weights on one device of `tp`."""
    infos = jax.tree.leaves(abstract_weights(spec, dtype), is_leaf=is_info)
    return sum(info.size_per_device(tp) * jnp.dtype(info.dtype).itemsize for info in infos)


def check_weights(spec: ModelSpec, dtype: Any, meshes: Sequence[Mesh]) -> None:
    """Raise InvalidValue if the weights are larger than the memory that they have to lie in, before any is made.

    Equal meshes share their weights. What else needs memory is counted when the weights are there.
    """
    each, own = weight_bytes(spec, dtype, meshes[0].size), set(jax.local_devices())
    placed = [device for mesh in dict.fromkeys(meshes) for device in mesh.devices.flat if device in own]
    if not placed:
        return
    device = placed[0]
    if device.platform == "cpu":
        needed, memory, where = each * len(placed), whole_memory(), "this machine has"
    else:
        needed = each * max(map(placed.count, placed))
        memory, where = int((device.memory_stats() or {}).get("bytes_limit", 0)), f"{device} has"
    if memory and needed > memory:
        raise InvalidValue(
            f"the model's weights take {needed} bytes in {jnp.dtype(dtype).name}, and {where} {memory}: choose a "
            "smaller or quantized model, or more devices per instance (T of --mesh RxT)",
            "model",
        )


def _known() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return {name: int(value.split()[0]) * 1024 for name, value in (line.split(":") for line in lines)}


def _of_group(file: str) -> int:
    """Return a number of the control group. Raises OSError if it has none, and ValueError if there is no limit."""
    return int((Path("/sys/fs/cgroup") / file).read_text(encoding="ascii"))
