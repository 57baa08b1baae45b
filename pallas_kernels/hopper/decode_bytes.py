"""Decode attention to keys and values of 8 bits: warps have keys of their own, and nothing is widened in shared memory.

A consumer's four warps take 16 keys each of every 64 of a tile, with a softmax of their own over all tiles of an item
(fragments.py). In the loop they meet only where they free a slot, as soon as what it holds is in registers. At the end
of an item they tell each other their highest scores and sums, and add up what they have mixed, through shared memory.

Mixed values of a latent are twice the registers of a warpgroup, so each of two consumers has half of their columns, and
takes every tile. Both compute all scores: that is more products, but they never wait for each other.

C tokens of keys in a tile, D head dim, R columns of the values, W of them that a product has. Of 16 query rows each
warp has all; row 16 w + r is warp w's.
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
    raw = shape.scale * (refs.k_scale[head] if shape.scaled else 1.0)
    unit = LOG2E if shape.softcap else raw * LOG2E

    def one(item: Any, number: Any, row: Any, tiles: Any, done: Any) -> None:
        first, half = refs.first[item], lax.rem(number, shape.queues)
        plgpu.barrier_wait(s["q_full"].at[half])
        q = None if shape.latent else _load(shape, s["q"].at[half], fragments.queries(), optimized=False)
        position = refs.contexts[row] - refs.lengths[row] + block * shape.block
        begin, count = (jnp.int32(0), tiles) if shape.joint else mine(shape, me, tiles, done)

        def step(j: Any, carry: Any) -> Any:
            mixed, peak, total = carry
            tile = begin + j * (1 if shape.joint else shape.consumers)
            slot = shape.place(done + tile)
            plgpu.barrier_wait(s["k_full"].at[slot])
            score = _scores(shape, s, q, half, slot)
            score = mask(shape, score, (first + tile) * shape.tile, position, raw)
            weight, fade, peak = soften(score, peak, unit)
            fresh = [weight[:, at : at + _kept(shape)] for at in range(0, weight.shape[1], _kept(shape))]
            # One sum of these an item will do.
            total = total * lax.broadcast_in_dim(fade, total.shape, (0,)) + reduce(jnp.add, fresh)
            mixed = [part * lax.broadcast_in_dim(fade, part.shape, (0,)) for part in mixed]
            return _mix(shape, s, mixed, weight, slot, me), peak, total

        def full(value: float, dims: tuple[int, ...], layout: Any) -> jax.Array:
            return cast(jnp.full(dims, value, jnp.float32), layout, shape.interpret)

        layout = plgpu.Layout.WGMMA
        nothing = [full(0.0, (WARPS * ROWS, shape.width), layout)] * (shape.mixed // shape.width)
        start = nothing, full(LEAST, (WARPS * ROWS,), layout.reduce(1))
        sums = full(0.0, (WARPS * ROWS, _kept(shape)), layout)
        mixed, peak, total = lax.fori_loop(0, count, step, (*start, sums))
        release(shape, s["q_free"].at[half])
        part = item if shape.joint else item * shape.consumers + me
        _meet(shape, refs, me, (part, head, block), (mixed, peak, jnp.sum(total, axis=1)))

    each_item(shape, refs, one)


def _kept(shape: Shape) -> int:
    """Columns of weights that are kept apart until the end of an item: few, where registers are."""
    return 8 if shape.latent else shape.tile // WARPS


def _scores(shape: Shape, s: dict[str, Any], q: jax.Array | None, half: Any, slot: Any) -> jax.Array:
    """[64, C / 4]; the slot of keys is free again, but of a latent. Its queries are too many for registers."""
    if q is not None:
        keys = _load(shape, s["k"].at[slot], fragments.keys())
        release(shape, s["k_free"].at[slot])
        return fragments.scores(q, keys, shape.interpret)
    score = None
    for begin in range(0, shape.dim, fragments.CHUNK):
        columns = pl.ds(begin, fragments.CHUNK)
        left = _load(shape, s["q"].at[half, :, columns], fragments.queries(), optimized=False)
        right = _load(shape, s["k"].at[slot, :, columns], fragments.keys())
        score = fragments.scores(left, right, shape.interpret, score)
    assert score is not None
    return score


def _mix(
    shape: Shape, s: dict[str, Any], mixed: list[jax.Array], weight: jax.Array, slot: Any, me: Any
) -> list[jax.Array]:
    """mixed + weight v [64, W] each; the slot of values is free again."""
    if not shape.latent:
        plgpu.barrier_wait(s["v_full"].at[slot])
        values = _load(shape, s["v"].at[slot], fragments.values(shape.dim))
        release(shape, s["v_free"].at[slot])
        return [fragments.mix(mixed[0], weight.astype(shape.dtype), values, shape.interpret)]
    weight = weight.astype(shape.dtype)
    made = []
    for n, part in enumerate(mixed):
        columns = pl.ds(me * shape.mixed + n * shape.width, shape.width)
        values = _load(shape, s["k"].at[slot, :, columns], fragments.values(shape.width))
        made.append(fragments.mix(part, weight, values, shape.interpret))
    release(shape, s["k_free"].at[slot])
    return made


def _load(shape: Shape, ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
    if is_interpreting(shape.interpret):
        plain: jax.Array = ref[...]
        return plain
    return compat.load(ref, layout, optimized=optimized)


def _meet(
    shape: Shape, refs: Refs, me: Any, place: tuple[Any, ...], state: tuple[list[jax.Array], jax.Array, jax.Array]
) -> None:
    """Put together what the four warps have of an item, and write it to its `place`."""
    mixed, peak, total = state
    told = refs.s["told"].at[me]
    top = _among(shape, told, peak, lax.max)
    fade = jnp.exp2(peak - top)
    total = _among(shape, told, total * fade, lax.add)
    safe = jnp.maximum(total, 1e-30)
    factor = fade * ((refs.v_scale[place[1]] if shape.scaled else 1.0) / safe)
    mixed = [part * lax.broadcast_in_dim(factor, part.shape, (0,)) for part in mixed]
    weight = jnp.where(total > 0, top + jnp.log(safe) * LOG2E, MASKED)
    told[pl.ds(0, 64)] = weight
    plgpu.commit_smem()
    if shape.joint:

        @pl.when(me == 0)
        def _() -> None:
            plgpu.copy_smem_to_gmem(told.at[pl.ds(0, ROWS)], refs.weight.at[place])
    else:
        plgpu.copy_smem_to_gmem(told.at[pl.ds(0, ROWS)], refs.weight.at[place])
    for column in range(0, shape.mixed, MEETING):
        met = refs.s["met"].at[me, :, pl.ds(0, MEETING)]
        part, begin = divmod(column, shape.width)
        met[...] = mixed[part][:, begin : begin + MEETING]
        plgpu.commit_smem()
        parts = [_load(shape, met.at[pl.ds(ROWS * w, ROWS)], _summed(), optimized=False) for w in range(WARPS)]
        first = me * shape.mixed + column if shape.joint else column
        refs.mixed[(*place, slice(None), pl.ds(first, MEETING))] = reduce(jnp.add, parts)
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
