"""Two warpgroups that compute every tile of a latent together: products of 64 rows, for many heads or query tokens.

The mixed values of 64 rows are 64 x 512 numbers, twice the registers that a warpgroup has for them. So each of two has
a half of the columns, and needs all the weights. They form the scores of one half of a tile's keys each, which is no
work twice, tell each other the highest score of each row, and put their weights where both can read them: into their
own slot of keys, over the columns that turn, which are no values, and of no use once the scores are formed.

M = 64 rows, R columns of the values, C = tokens of keys in a tile, one half of them in each of two slots of the ring.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat
from pallas_kernels.compat import plgpu
from pallas_kernels.hopper.decode_shape import Refs, Shape, each_item
from pallas_kernels.hopper.decode_steps import mask, release
from pallas_kernels.hopper.prefill_shape import LEAST, LOG2E
from pallas_kernels.interpret import cast, wgmma, wgmmas
from pallas_kernels.layout import MASKED

State = tuple[jax.Array, jax.Array, jax.Array]  # mixed [M, R / 2], peak [M] in log2 units, total [M]


def consume(shape: Shape, refs: Refs, me: Any) -> None:
    s, block, head = refs.s, lax.axis_index("block"), lax.axis_index("head")

    def one(item: Any, number: Any, row: Any, tiles: Any, done: Any) -> None:
        plgpu.barrier_wait(s["q_full"].at[0])
        position = refs.contexts[row] - refs.lengths[row] + block * shape.block

        def step(i: Any, state: State) -> State:
            key = (refs.first[item] + i) * shape.tile + me * shape.slot
            return _tile(shape, s, me, done + i, key, position, state)

        acc, peak, total = lax.fori_loop(0, tiles, step, _begin(shape))
        release(shape, s["q_free"].at[0])
        total = total + _told(shape, s, me, total)
        _meet(s, 1)
        safe = jnp.maximum(total, 1e-30)
        mixed = acc * lax.broadcast_in_dim(1.0 / safe, acc.shape, (0,))
        refs.mixed[item, head, block, :, pl.ds(me * shape.width, shape.width)] = mixed

        @pl.when(me == 0)
        def _() -> None:
            refs.weight[item, head, block] = jnp.where(total > 0, peak + jnp.log(safe) * LOG2E, MASKED)

    each_item(shape, refs, one)


def _begin(shape: Shape) -> State:
    layout = shape.layout("ACC")

    def full(value: float, dims: tuple[int, ...], layout: Any) -> jax.Array:
        return cast(jnp.full(dims, value, jnp.float32), layout, shape.interpret)

    row = layout.reduce(1)
    return full(0.0, (shape.rows, shape.width), layout), full(LEAST, (shape.rows,), row), full(0.0, (shape.rows,), row)


def _tile(shape: Shape, s: dict[str, Any], me: Any, tile: Any, key: Any, position: Any, state: State) -> State:
    """Attend to the keys of the block's `tile`th tile, those of this warpgroup from `key` on."""
    acc, peak, total = state
    slots, mine = [shape.place(tile, part) for part in range(shape.slots)], shape.place(tile, me)
    for slot in slots:  # before its scores are formed: both read both
        plgpu.barrier_wait(s["k_full"].at[slot])
    unit = LOG2E if shape.softcap else shape.scale * LOG2E
    score = wgmma(s["q"].at[0], s["k"].at[mine], transposed=True, interpret=shape.interpret)
    score = mask(shape, score, key, position, shape.scale)
    top = jnp.maximum(peak, jnp.max(score, axis=1) * unit)
    top = jnp.maximum(top, _told(shape, s, me, top))
    weight = jnp.exp2(score * unit - lax.broadcast_in_dim(top, score.shape, (0,)))
    fade = jnp.exp2(peak - top)
    turning = pl.ds(shape.values, shape.slot)
    s["k"][mine, :, turning] = weight.astype(shape.dtype)
    plgpu.commit_smem()
    total = total * fade + jnp.sum(weight, axis=1)
    acc = acc * lax.broadcast_in_dim(fade, acc.shape, (0,))
    _meet(s, 1)
    columns = pl.ds(me * shape.width, shape.width)
    acc = wgmmas(acc, [(s["k"].at[n, :, turning], s["k"].at[n, :, columns]) for n in slots], shape.interpret)
    for slot in slots:
        release(shape, s["k_free"].at[slot])
    return acc, top, total


def _told(shape: Shape, s: dict[str, Any], me: Any, x: jax.Array) -> jax.Array:
    """What the other warpgroup tells, where this one tells x [M]. Both must `_meet` before they tell again."""
    s["told"][me] = x
    _meet(s, 0)
    return compat.load(s["told"].at[1 - me], shape.layout("ACC").reduce(1), optimized=False)


def _meet(s: dict[str, Any], which: int) -> None:
    plgpu.barrier_arrive(s["met"].at[which])
    plgpu.barrier_wait(s["met"].at[which])
