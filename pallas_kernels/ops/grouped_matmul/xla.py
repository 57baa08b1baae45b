"""Compute the products of a mixture of experts in plain XLA, tile by tile.

On TPUs this is `lax.ragged_dot`. Elsewhere XLA lowers that to one dense product of all rows with
all experts: on a CPU, 4,096 rows and 32 experts of 256 x 512 took fifty times as long as the loop
over tiles.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.grouped_matmul.plan import Groups


def grouped_matmul(
    x: jax.Array,  # [R, I], rows ordered by `work`
    weight: jax.Array,  # [X, I, O], of 16 or 8 bits
    work: Groups,
    *,
    tile: int,
    scale: jax.Array | None = None,
    out_dtype: Any = None,
) -> jax.Array:
    """Return x[r] @ weight[owner[r]], [R, O] of `out_dtype`; padding rows hold arbitrary values.

    `work` is `plan_experts(..., tile=tile)`. `scale` [X, n, O] float32 multiplies the weights, n
    scales along I: with one, it multiplies the result; with more, the weights are widened first.
    """
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    tiles, ragged = (partial(run, out_dtype=out_dtype) for run in (partial(_tiles, tile=tile), _ragged))
    out: jax.Array = lax.platform_dependent(x, weight, work, scale, tpu=ragged, default=tiles)
    return out


def _tiles(
    x: jax.Array, weight: jax.Array, work: Groups, scale: jax.Array | None, *, tile: int, out_dtype: Any
) -> jax.Array:
    def multiply(i: jax.Array, out: jax.Array) -> jax.Array:
        mine, factor = (
            None if part is None else lax.dynamic_index_in_dim(part, work.expert[i], keepdims=False)
            for part in (weight, scale)
        )
        rows = lax.dynamic_slice_in_dim(x, work.begin[i], tile)
        # Rows of the slice beyond this tile belong to later tiles, which overwrite them.
        return lax.dynamic_update_slice_in_dim(out, _product(rows, mine, factor, out_dtype), work.begin[i], 0)

    empty = jnp.zeros((len(x), weight.shape[2]), out_dtype)
    out: jax.Array = lax.fori_loop(0, work.used[0], multiply, empty)
    return out


def _product(x: jax.Array, weight: Any, scale: jax.Array | None, out_dtype: Any) -> jax.Array:
    """Multiply x [M, I] by weight [I, O], with scale [n, O]."""
    if scale is None:
        return jnp.dot(x, weight, preferred_element_type=out_dtype)
    if len(scale) > 1:
        return jnp.dot(x, widened(weight, scale, x.dtype), preferred_element_type=out_dtype)
    out = jnp.dot(x, weight.astype(x.dtype), preferred_element_type=out_dtype)
    return (out.astype(jnp.float32) * scale).astype(out_dtype)


def _ragged(x: jax.Array, weight: jax.Array, work: Groups, scale: jax.Array | None, *, out_dtype: Any) -> jax.Array:
    blocks = scale is not None and scale.shape[1] > 1
    wide = widened(weight, scale, x.dtype) if blocks else weight.astype(x.dtype)
    out = lax.ragged_dot(x, wide, work.sizes, preferred_element_type=out_dtype)
    if scale is None or blocks:
        return out
    return (out.astype(jnp.float32) * scale[:, 0][work.owner]).astype(out_dtype)


def widened(weight: jax.Array, scale: Any, dtype: Any) -> jax.Array:
    """Return weight [..., I, O] times scale [..., n, O], multiplied in float32."""
    spread = jnp.repeat(scale, weight.shape[-2] // scale.shape[-2], axis=-2)
    return (weight.astype(jnp.float32) * spread).astype(dtype)
