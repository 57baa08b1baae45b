"""What the consumers of decode attention have in common: to mask scores, and to free a slot that they have read."""

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


def mask(shape: Shape, score: jax.Array, key: Any, position: Any, raw: Any) -> jax.Array:
    """Soft cap, then MASKED where row r, of query token position + r // G, may not see key + c."""
    if shape.softcap:
        # tanh(x) = 1 - 2 / (e^2x + 1): the hardware's own tanh is good to 11 bits only.
        grown = jnp.exp2(score * (raw * 2 * LOG2E / shape.softcap))
        score = shape.softcap - (2 * shape.softcap) / (grown + 1.0)

    layout = shape.layout("ACC", jnp.float32 if shape.warps else None)

    def iota(axis: int) -> jax.Array:
        return cast(lax.broadcasted_iota(jnp.int32, score.shape, axis), layout, shape.interpret)

    token = lax.div(iota(0), jnp.int32(shape.group)) if shape.block > 1 else 0
    if shape.dim > 128:
        # A thread has columns 8 i + 0, 1 of its place: of 8 i the compiler makes constants. Whole columns would be held
        # in a register each, and beside so many others they spill. Narrower heads do better with them.
        column = iota(1)
        ahead, last = column & ~7, (position - key) + token - (column & 7)
    else:
        ahead, last = iota(1) + (key - position), token  # of the block's first token
    seen = ahead <= last
    if shape.window is not None:
        seen &= ahead > last - shape.window
    return jnp.where(seen, score, MASKED)
