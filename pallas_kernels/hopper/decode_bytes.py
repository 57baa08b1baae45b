"""Decode attention to keys and values of 8 bits: warps have keys of their own, and nothing is widened in shared memory.

A consumer's four warps take 16 keys each of every 64 of a tile, with a softmax of their own over all tiles of an item
(fragments.py). In the loop they meet only where they free a slot, as soon as what it holds is in registers. At the end
of an item they tell each other their highest scores and sums, and add up what they have mixed, through shared memory.

C tokens of keys in a tile, D head dim. Of 16 query rows each warp has all; row 16 w + r is warp w's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat
from pallas_kernels.compat import plgpu
from pallas_kernels.hopper import fragments
from pallas_kernels.hopper.decode_shape import MEETING, Refs, Shape, each_item
from pallas_kernels.hopper.decode_steps import mask, mine, release, soften
from pallas_kernels.hopper.fragments import ROWS, WARPS
from pallas_kernels.hopper.prefill_shape import LEAST, LOG2E
from pallas_kernels.hopper.widen import tiled
from pallas_kernels.interpret import cast, is_interpreting
from pallas_kernels.layout import MASKED


def consume(shape: Shape, refs: Refs, me: Any) -> None:
    s, block, head = refs.s, lax.axis_index("block"), lax.axis_index("head")
    raw = shape.scale * refs.k_scale[head]
    unit = LOG2E if shape.softcap else raw * LOG2E

    def one(item: Any, number: Any, row: Any, tiles: Any, done: Any) -> None:
        first, half = refs.first[item], lax.rem(number, shape.queues)
        plgpu.barrier_wait(s["q_full"].at[half])
        q = _load(shape, s["q"].at[half], fragments.queries(), optimized=False)
        position = refs.contexts[row] - refs.lengths[row] + block * shape.block
        begin, count = mine(shape, me, tiles, done)

        def step(j: Any, carry: Any) -> Any:
            mixed, peak, total = carry
            tile = begin + j * shape.consumers
            slot = shape.place(done + tile)
            plgpu.barrier_wait(s["k_full"].at[slot])
            keys = _load(shape, s["k"].at[slot], fragments.keys())
            release(shape, s["k_free"].at[slot])
            score = fragments.scores(q, keys, shape.interpret)
            score = mask(shape, score, (first + tile) * shape.tile, position, raw)
            weight, fade, peak = soften(score, peak, unit)
            total = total * lax.broadcast_in_dim(fade, total.shape, (0,)) + weight  # one sum an item will do
            mixed = mixed * lax.broadcast_in_dim(fade, mixed.shape, (0,))
            plgpu.barrier_wait(s["v_full"].at[slot])
            values = _load(shape, s["v"].at[slot], fragments.values(shape.dim))
            release(shape, s["v_free"].at[slot])
            return fragments.mix(mixed, weight.astype(shape.dtype), values, shape.interpret), peak, total

        def full(value: float, dims: tuple[int, ...], layout: Any) -> jax.Array:
            return cast(jnp.full(dims, value, jnp.float32), layout, shape.interpret)

        layout = plgpu.Layout.WGMMA
        start = full(0.0, (WARPS * ROWS, shape.dim), layout), full(LEAST, (WARPS * ROWS,), layout.reduce(1))
        sums = full(0.0, (WARPS * ROWS, shape.tile // WARPS), layout)
        mixed, peak, total = lax.fori_loop(0, count, step, (*start, sums))
        release(shape, s["q_free"].at[half])
        part = item * shape.consumers + me
        _meet(shape, refs, me, (part, head, block), (mixed, peak, jnp.sum(total, axis=1)))

    each_item(shape, refs, one)


def _load(shape: Shape, ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
    if is_interpreting(shape.interpret):
        plain: jax.Array = ref[...]
        return plain
    return compat.load(ref, layout, optimized=optimized)


def _meet(
    shape: Shape, refs: Refs, me: Any, place: tuple[Any, ...], state: tuple[jax.Array, jax.Array, jax.Array]
) -> None:
    """Put together what the four warps have of an item, and write it to its `place`."""
    mixed, peak, total = state
    told = refs.s["told"].at[me]
    top = _among(shape, told, peak, lax.max)
    fade = jnp.exp2(peak - top)
    total = _among(shape, told, total * fade, lax.add)
    safe = jnp.maximum(total, 1e-30)
    factor = fade * (refs.v_scale[place[1]] / safe)
    mixed = mixed * lax.broadcast_in_dim(factor, mixed.shape, (0,))
    weight = jnp.where(total > 0, top + jnp.log(safe) * LOG2E, MASKED)
    told[pl.ds(0, 64)] = weight
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(told.at[pl.ds(0, ROWS)], refs.weight.at[place])
    for column in range(0, shape.dim, MEETING):
        met = refs.s["met"].at[me, :, pl.ds(0, MEETING)]
        met[...] = mixed[:, column : column + MEETING]
        plgpu.commit_smem()
        parts = [_load(shape, met.at[pl.ds(ROWS * w, ROWS)], _summed(), optimized=False) for w in range(WARPS)]
        refs.mixed[(*place, slice(None), pl.ds(column, MEETING))] = reduce(jnp.add, parts)
        plgpu.commit_smem()  # all have read it
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _among(shape: Shape, told: Any, x: jax.Array, join: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """x [64] joined with that of the same query row in the other warps."""
    for begin in (0, WARPS * ROWS):
        told[pl.ds(begin, WARPS * ROWS)] = x
    plgpu.commit_smem()
    layout = plgpu.Layout.WGMMA.reduce(1)
    turned = [told.at[pl.ds(ROWS * w, WARPS * ROWS)] for w in range(1, WARPS)]
    joined = reduce(join, [_load(shape, ref, layout, optimized=False) for ref in turned], x)
    plgpu.commit_smem()  # all have read it
    return joined


def _summed() -> Any:
    """Registers of what four warps mixed, summed [16, MEETING]: rows lie together in global memory."""
    return tiled((16, 64), (4, 64), (2, 64), (4,), warps=(-7,), lanes=(-3, -2))
