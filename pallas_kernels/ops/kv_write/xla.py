"""Write rotated keys and values to their pages, in plain XLA.

    pool[write[t]] = x[t]              in the dtype of the pool
    pool[write[t]] = x[t] / scale[k]   with `scales` (fp8 e4m3, int8), clipped to the largest value

After `rope.rotate`, gives the same numbers as `hopper.rope_and_write`. A latent (one pool) is
already divided by its scales, if it has any, and is clipped alike.

Letters: T tokens, N pages in the pool, B page size, K kv heads, D head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.layout import Ragged, Scales
from pallas_kernels.words import narrow, wide

LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}  # largest quantized value, by dtype of the pool


def write_kv(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ragged: Ragged,
    scales: Scales | None = None,
    heads_first: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Write k, v [T, K, D] to `ragged.write` of the pools [N, B, K, D] or [N, K, B, D]; drop padding tokens."""
    if scales is not None:
        k, v = quantized(k, scales.k, k_pool.dtype), quantized(v, scales.v, v_pool.dtype)
    return scatter(k_pool, k, ragged.write, heads_first), scatter(v_pool, v, ragged.write, heads_first)


def quantized(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return x [T, K, D] / scale [K] in `dtype`; see `fitted`."""
    return fitted(x.astype(jnp.float32) / scale[None, :, None], dtype)


def fitted(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Convert x to `dtype`; to 8 bits, round to even and clip to its range (never NaN)."""
    largest = LARGEST.get(jnp.dtype(dtype).name)
    if largest is None:
        return x.astype(dtype)
    small = jnp.clip(x.astype(jnp.float32), -largest, largest)
    return (jnp.round(small) if jnp.issubdtype(dtype, jnp.integer) else small).astype(dtype)


def write_latent(pool: jax.Array, latent: jax.Array, where: jax.Array) -> jax.Array:
    """Write rotated latents [T, K, D] to token places [T] of the pool [N, B, K, D]; drop those out of range."""
    return scatter(pool, fitted(latent, pool.dtype), where)


def scatter(pool: jax.Array, new: jax.Array, where: jax.Array, heads_first: bool = False) -> jax.Array:
    """Write new [T, K, D] to places [T] of the pool [N, B, K, D] or [N, K, B, D]; drop those out of range."""
    # The pool keeps its own shape: with one kv head per shard, XLA on CPU gives the result of a reshape another
    # layout and copies the whole pool back, twice per layer (80 ms a step for a pool of 128 MiB).
    size, new = pool.shape[2 if heads_first else 1], new.astype(pool.dtype)
    page, token = where // size, where % size
    place = (page, slice(None), token) if heads_first else (page, token)
    if jnp.issubdtype(pool.dtype, jnp.integer):  # words of these would cost a copy of the pool on CPU
        return pool.at[place].set(new, mode="drop", unique_indices=True)
    after = wide(pool).at[place].set(wide(new), mode="drop", unique_indices=True)
    return narrow(after, pool)
