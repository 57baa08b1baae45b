"""Keys and values into their pages, turned and quantised on the way, in plain XLA.

    pool[write[t]] = rotate(x[t])              in the dtype of the pool
    pool[write[t]] = rotate(x[t]) / scale[k]   where `scales` are given (fp8 e4m3, int8), cut off at the largest value

A latent (one pool) comes divided by its scales, if it has any, and is cut off just so.

The twin of `hopper.kv_write`, with the same numbers: turned in float32, rounded to the dtype of x, then quantised.
Letters: T tokens, N pages in the pool, B page size, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.layout import Ragged, Scales
from pallas_kernels.rope import Turn, rotate
from pallas_kernels.words import narrow, wide

LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}  # what a quantised value may be at most, by the dtype of the pool


def rope_and_write_xla(
    q: jax.Array,  # [T, H, D]
    k: jax.Array,  # [T, K, D]
    v: jax.Array,  # [T, K, D]
    turn: Turn | None,
    k_pool: jax.Array,  # [N, B, K, D]
    v_pool: jax.Array,  # [N, B, K, D]
    ragged: Ragged,
    *,
    scales: Scales | None = None,
    heads_first: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Turned queries and the pools with this step's keys and values; padding tokens are dropped."""
    return rotate(q, turn), *write_kv(k_pool, v_pool, rotate(k, turn), v, ragged, scales, heads_first)


def write_kv(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ragged: Ragged,
    scales: Scales | None = None,
    heads_first: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Put k, v [T, K, D] at `ragged.write` of the pools [N, B, K, D], or [N, K, B, D]; padding tokens are dropped."""
    if scales is not None:
        k, v = quantised(k, scales.k, k_pool.dtype), quantised(v, scales.v, v_pool.dtype)
    return scatter(k_pool, k, ragged.write, heads_first), scatter(v_pool, v, ragged.write, heads_first)


def quantised(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x [T, K, D] / scale [K] in `dtype`: see `fitted`."""
    return fitted(x.astype(jnp.float32) / scale[None, :, None], dtype)


def fitted(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x in `dtype`; in 8 bits rounded to even, and cut off at what they can hold (never NaN)."""
    largest = LARGEST.get(jnp.dtype(dtype).name)
    if largest is None:
        return x.astype(dtype)
    small = jnp.clip(x.astype(jnp.float32), -largest, largest)
    return (jnp.round(small) if jnp.issubdtype(dtype, jnp.integer) else small).astype(dtype)


def write_latent(pool: jax.Array, latent: jax.Array, where: jax.Array) -> jax.Array:
    """The pool [N, B, K, D] with latents [T, K, D], turned, at token places [T]; those out of range are dropped."""
    return scatter(pool, fitted(latent, pool.dtype), where)


def scatter(pool: jax.Array, new: jax.Array, where: jax.Array, heads_first: bool = False) -> jax.Array:
    """The pool, [N, B, K, D] or [N, K, B, D], with new [T, K, D] at places [T]; those out of range are dropped."""
    # In the pool's own shape: for one kv head per shard, XLA on CPU gives the result of a reshape another layout and
    # copies the whole pool back, twice per layer (80 ms a step for a pool of 128 MiB).
    size, new = pool.shape[2 if heads_first else 1], new.astype(pool.dtype)
    page, token = where // size, where % size
    place = (page, slice(None), token) if heads_first else (page, token)
    if jnp.issubdtype(pool.dtype, jnp.integer):  # words of them would cost a copy of the pool on CPU
        return pool.at[place].set(new, mode="drop", unique_indices=True)
    after = wide(pool).at[place].set(wide(new), mode="drop", unique_indices=True)
    return narrow(after, pool)
