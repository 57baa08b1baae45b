"""The warpgroup of prefill attention that brings keys and values into shared memory, one TMA for each page.

Pools of 8 bits arrive in rings of their own, from where this warpgroup widens them, through its registers, into the
rings that the other two read: the tensor core takes 8-bit values only transposed, which pages are not. Scales need no
product here: those of the keys go into the scores, those of the values into the results.

B page size, D head dim.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import plgpu
from pallas_kernels.hopper.prefill_shape import MOST, ROWS, Item, Refs, Shape
from pallas_kernels.hopper.widen import widened


class _Side(NamedTuple):
    """Keys, or values: whence, whereto, and what tells that they are there."""

    pool: Any
    ring: Any
    full: Any
    free: Any
    narrow: Any  # of 8-bit pools, else None
    arrived: Any
    columns: tuple[Any, ...]  # index of those that are wanted: () for all


def _sides(shape: Shape, refs: Refs, item: Item) -> tuple[_Side, _Side]:
    part = (pl.ds(item.half * shape.columns, shape.columns),) if shape.halves > 1 else ()
    return (
        _Side(refs.k, refs.k_s, refs.k_full, refs.k_free, refs.k_8, refs.k_in, ()),
        _Side(refs.v, refs.v_s, refs.v_full, refs.v_free, refs.v_8, refs.v_in, part),
    )


def produce(shape: Shape, refs: Refs, item: Item, step: jax.Array) -> jax.Array:
    """Keys and values of an item; `step` counts tiles of keys over all items. Returns the next item's first."""
    sides = _sides(shape, refs, item)
    if shape.quantised:
        for j in range(shape.stages):  # on the way before the first is widened
            pl.when(j < item.steps)(partial(_fetch_both, shape, refs, item, sides, step, jnp.int32(j)))

    def tile(j: jax.Array, step: jax.Array) -> jax.Array:
        slot = lax.rem(step, jnp.int32(shape.stages))
        for side in sides:
            if shape.quantised:
                _widen(shape, refs, item, side, step, j)
                continue

            @pl.when(step >= shape.stages)
            def _wait(side: _Side = side) -> None:
                plgpu.barrier_wait(side.free.at[slot])

            _fetch(shape, refs, item, side, j, side.ring.at[slot], side.full.at[slot])
        return step + 1

    after: jax.Array = lax.fori_loop(0, item.steps, tile, step)
    return after


def drain(shape: Shape, refs: Refs, steps: jax.Array) -> None:
    """Wait for what was never waited for: the interpreter wants it of every barrier, a device does not."""
    for slot in range(shape.stages):

        @pl.when(steps > slot)
        def _wait(slot: int = slot) -> None:
            plgpu.barrier_wait(refs.k_free.at[slot])
            plgpu.barrier_wait(refs.v_free.at[slot])


def _fetch(shape: Shape, refs: Refs, item: Item, side: _Side, j: jax.Array, into: Any, arrived: Any) -> None:
    """Start copying the j-th tile of keys or values."""
    i, head = item.start + item.key_tile(j), item.kv_head(shape)
    size = min(shape.page, shape.keys)
    tokens: Any = slice(None)
    for part in range(shape.copies):
        if shape.page <= shape.keys:
            page = refs.table[item.row, i * shape.copies + part]
        else:
            parts = jnp.int32(shape.page // shape.keys)
            page, tokens = refs.table[item.row, lax.div(i, parts)], pl.ds(lax.rem(i, parts) * size, size)
        source = side.pool.at[(page, tokens, head, *side.columns)]
        plgpu.copy_gmem_to_smem(source, into.at[pl.ds(part * size, size)], arrived)


def _fetch_both(
    shape: Shape, refs: Refs, item: Item, sides: tuple[_Side, _Side], step: jax.Array, j: jax.Array
) -> None:
    slot = lax.rem(step + j, jnp.int32(shape.stages))
    for side in sides:
        _fetch(shape, refs, item, side, j, side.narrow.at[slot], side.arrived.at[slot])


def _widen(shape: Shape, refs: Refs, item: Item, side: _Side, step: jax.Array, j: jax.Array) -> None:
    """The j-th tile, of 8 bits, into the ring that products read; its own place goes to the tile `stages` on."""
    slot = lax.rem(step, jnp.int32(shape.stages))
    plgpu.barrier_wait(side.arrived.at[slot])

    @pl.when(step >= shape.stages)
    def _wait() -> None:
        plgpu.barrier_wait(side.free.at[slot])

    width = shape.columns if side.columns else shape.dim
    for row, column in product(range(0, shape.keys, ROWS), range(0, width, MOST)):
        part = pl.ds(row, ROWS), pl.ds(column, min(width, MOST))
        side.ring[(slot, *part)] = widened(side.narrow.at[(slot, *part)], shape.dtype, shape.interpret)
    plgpu.commit_smem()
    plgpu.barrier_arrive(side.full.at[slot])

    @pl.when(j + shape.stages < item.steps)
    def _next() -> None:
        _fetch(shape, refs, item, side, j + shape.stages, side.narrow.at[slot], side.arrived.at[slot])
