"""What the consumers of decode attention have in common: their tiles, masks and weights, and to free a slot."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import plgpu
from pallas_kernels.hopper.decode_shape import Shape
from pallas_kernels.hopper.prefill_shape import LOG2E
from pallas_kernels.interpret import cast, fence
from pallas_kernels.layout import MASKED


def release(shape: Shape, free: Any) -> None:
    if shape.warps:
        plgpu.commit_smem()  # ordinary loads have read the slot, TMA writes it next
    else:
        fence(shape.interpret)
    plgpu.barrier_arrive(free)


def mine(shape: Shape, me: Any, tiles: Any, done: Any) -> tuple[Any, Any]:
    """The first of a consumer's tiles in an item, and how many they are; tiles are counted over all items."""
    first = lax.rem(me + shape.consumers - lax.rem(done, shape.consumers), shape.consumers)
    first = jnp.int32(first if shape.consumers > 1 else 0)
    return first, lax.div(tiles - first + (shape.consumers - 1), shape.consumers)


def soften(score: jax.Array, peak: jax.Array, unit: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights of scores, what earlier ones fade by, and the highest score in units of log2."""
    top = jnp.maximum(peak, jnp.max(score, axis=1) * unit)
    weight = jnp.exp2(score * unit - lax.broadcast_in_dim(top, score.shape, (0,)))
    return weight, jnp.exp2(peak - top), top


def mask(shape: Shape, score: jax.Array, key: Any, position: Any, raw: Any) -> jax.Array:
    """Soft cap, then MASKED where row r, of query token position + r // G, may not see key + c."""
    if shape.softcap:
        # tanh(x) = 1 - 2 / (e^2x + 1): the hardware's own tanh is good to 11 bits only.
        grown = jnp.exp2(score * (raw * 2 * LOG2E / shape.softcap))
        score = shape.softcap - (2 * shape.softcap) / (grown + 1.0)

    layout = shape.layout("ACC", jnp.float32 if shape.warps else None)

    def iota(axis: int) -> jax.Array:
        return cast(lax.broadcasted_iota(jnp.int32, score.shape, axis), layout, shape.interpret)

    if shape.parted:
        # Row 16 w + r and column 16 c + n are query row r and key 64 c + 16 w + n (fragments.py).
        row, column = iota(0), iota(1)
        token = lax.div(row & 15, jnp.int32(shape.group)) if shape.block > 1 else 0
        return _seen(shape, score, (column & 15) + ((column & ~15) << 2) + (row & 48) + (key - position), token)
    token = lax.div(iota(0), jnp.int32(shape.group)) if shape.block > 1 else 0
    if shape.dim > 128:
        # A thread has columns 8 i + 0, 1 of its place: of 8 i the compiler makes constants. Whole columns would be held
        # in a register each, and beside so many others they spill. Narrower heads do better with them.
        column = iota(1)
        ahead, last = column & ~7, (position - key) + token - (column & 7)
    else:
        ahead, last = iota(1) + (key - position), token  # of the block's first token
    return _seen(shape, score, ahead, last)


def _seen(shape: Shape, score: jax.Array, ahead: jax.Array, last: Any) -> jax.Array:
    seen = ahead <= last
    if shape.window is not None:
        seen &= ahead > last - shape.window
    return jnp.where(seen, score, MASKED)
