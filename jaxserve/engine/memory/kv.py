"""The KV pool of an instance: its size in pages, and its allocation."""

from __future__ import annotations

import logging
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.engine.memory.room import free_memory
from jaxserve.models.spec import ModelSpec
from jaxserve.sched.api.errors import InvalidValue

log = logging.getLogger(__name__)

MOST_ON_CPU = 2 << 30  # bytes of all pools together, by default
USABLE = 0.95  # of jax's reserved memory: the rest is for transfers, autotuning and fragmentation
STEPS_PER_OCTAVE = 16  # pool sizes are rounded down to this many steps per doubling

# Values of `--kv-cache-dtype` besides auto.
STORED = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "int8": "int8",
}


def pool_dtype(name: str, dtype: Any) -> Any:
    """Return the pool dtype for a value of `--kv-cache-dtype`; auto is the model's `dtype`."""
    return jnp.dtype(dtype if name == "auto" else STORED[name])


def scaled(name: str) -> bool:
    """Return whether pools of this dtype name need scales, that is, have 8 bits."""
    return name != "auto" and bool(pool_dtype(name, None).itemsize == 1)


def default_page_size(platform: str) -> int:
    """Return the tokens per page; on accelerators the size that their kernels are written for."""
    return 16 if platform == "cpu" else 64


def page_bytes(spec: ModelSpec, page_size: int, dtype: Any) -> int:
    """Return the bytes of one page over all layers and all devices of an instance."""
    return spec.cache.page_bytes(page_size, dtype)


def without_states(spec: ModelSpec, slots: int, size: int) -> int:
    """Return the bytes that are left for pages of pools of `size` bytes, after the states of `slots` requests."""
    states = 0 if spec.cache.state is None else spec.cache.state.slot_bytes() * slots
    if states and states >= size:
        raise InvalidValue(
            f"max_num_seqs={slots}: the states of so many requests take {states} bytes of an instance's {size} for "
            "caches: lower max_num_seqs",
            "max_num_seqs",
        )
    return size - states


def cpu_pool_bytes(total: int | None, instances: int) -> int:
    """Return the bytes of each instance's pool on CPU.

    `total` None: the smaller of 2 GiB and a quarter of free memory.
    """
    return (min(MOST_ON_CPU, free_memory() // 4) if total is None else total) // instances


def device_pool_bytes(
    mesh: Mesh,
    *,
    utilization: float,
    weights: int,
    temporaries: int,
    sharing: int,
    memory: int | None = None,
    reserved: float = 1.0,
) -> int:
    """Return the bytes of an instance's pool over its whole mesh on an accelerator.

    weights, temporaries: bytes per device of one copy of the weights and of the largest program.
    sharing: number of instances on the same device. memory: bytes per device; None: ask the device, of whose
    memory jax's allocator has the share `reserved`.
    """
    device = mesh.devices.flat[0]
    if memory is None:
        limit = int((device.memory_stats() or {}).get("bytes_limit", 0))
        if not limit:
            raise InvalidValue(
                f"{device} does not report its memory: set --kv-cache-memory to the bytes of all KV caches together",
                "kv_cache_memory",
            )
        memory = round(limit / reserved)
        if utilization > USABLE * reserved:
            log.info(
                "gpu_memory_utilization=%g: limited to %.3g, since jax reserves %g",
                utilization,
                USABLE * reserved,
                reserved,
            )
            utilization = USABLE * reserved
    return pool_bytes(
        memory,
        mesh.size,
        utilization=utilization,
        weights=weights,
        temporaries=temporaries,
        where=str(device),
        sharing=sharing,
    )


def pool_bytes(
    memory: float, devices: int, *, utilization: float, weights: int, temporaries: int, where: str, sharing: int = 1
) -> int:
    """Compute `device_pool_bytes` for `devices` devices of `memory` bytes; `where` names one in errors."""
    left = utilization * memory - weights - temporaries
    if left <= 0:
        raise InvalidValue(
            f"gpu_memory_utilization={utilization} of {memory:.0f} bytes on {where} leaves nothing for the KV cache: "
            f"weights take {weights} bytes and a step's temporaries {temporaries}",
            "gpu_memory_utilization",
        )
    return int(left / sharing) * devices


def fit_pages(
    spec: ModelSpec,
    page_size: int,
    dtype: Any,
    *,
    pool_bytes: int,
    max_model_len: int,
    name: str = "kv_cache_memory",
    more: int = 0,
) -> int:
    """Return the number of pages of one instance's pool.

    more: bytes per page beyond the model's own, for a draft model.

    The number is rounded down to a coarse grid: it is part of every program's shape, and free memory
    differs slightly from start to start, which would recompile every program. Raises InvalidValue if
    a request of `max_model_len` does not fit.
    """
    each = page_bytes(spec, page_size, dtype) + more
    pages = pool_bytes // each
    needed = -(-max_model_len // page_size)
    if pages < needed:
        lower = f", or lower max_model_len to {pages * page_size}" if pages else ""
        raise InvalidValue(
            f"a KV pool of {pool_bytes} bytes holds {pages} pages of {page_size} tokens ({each} bytes each), fewer "
            f"than the {needed} that {max_model_len=} needs ({needed * each} bytes per instance): raise "
            f"{name}{lower}",
            name,
        )
    grid = max(1, (1 << (pages.bit_length() - 1)) // STEPS_PER_OCTAVE)
    pages = max(needed, pages // grid * grid)
    log.info("KV pool: %d pages, %d tokens, %.2f GiB per instance", pages, pages * page_size, pages * each / 2**30)
    return pages
