"""Checksums of KV on the devices: a copy is compared with its source, and neither moves to the host.

Each element is mixed with its position in the shard, so that elements in another order give another
sum, and each shard has a sum of its own, so that no device waits for another. A wrong copy of a
shard has the right sum in one of 2**32 cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def checksum(array: jax.Array) -> jax.Array:
    """Return the checksum of an array of elements of 1, 2 or 4 bytes, as uint32."""
    bits = lax.bitcast_convert_type(array, WORDS[array.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.zeros(array.shape, jnp.uint32)
    for axis in range(array.ndim):
        stride = math.prod(array.shape[axis + 1 :]) % (1 << 32)
        place += lax.broadcasted_iota(jnp.uint32, array.shape, axis) * jnp.uint32(stride)
    return jnp.sum(_mixed(bits ^ _mixed(place)), dtype=jnp.uint32)


def _mixed(x: jax.Array) -> jax.Array:
    """Mix the bits of uint32 words, one to one (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def checksums(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Dispatch the checksums of arrays on a mesh with the axis `tp`: one [tp] of uint32 for each array."""
    sums = []
    for array in arrays:
        sharding = array.sharding
        assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
        sums.append(_program(sharding.mesh, sharding.spec)(array))
    return sums


@cache
def _program(mesh: Mesh, partition: PartitionSpec) -> Callable[[jax.Array], jax.Array]:
    def kv_checksum(array: jax.Array) -> jax.Array:
        return checksum(array)[None]

    program: Callable[[jax.Array], jax.Array] = jax.jit(
        jax.shard_map(kv_checksum, mesh=mesh, in_specs=partition, out_specs=PartitionSpec("tp"), check_vma=False)
    )
    return program
