"""The warpgroup of decode attention that brings queries, keys and values into shared memory, one TMA for each page."""

from __future__ import annotations

from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import plgpu
from pallas_kernels.hopper.decode_shape import Refs, Shape, each_item


def produce(shape: Shape, refs: Refs) -> None:
    s, block, head = refs.s, lax.axis_index("block"), lax.axis_index("head")

    def one(item: Any, number: Any, row: Any, tiles: Any, done: Any) -> None:
        first = refs.first[item]
        place = lax.rem(number, shape.queues)

        @pl.when(number >= shape.queues)
        def _() -> None:
            plgpu.barrier_wait(s["q_free"].at[place])

        target = s["q"].at[place] if shape.packed == shape.rows else s["q"].at[place, pl.ds(0, shape.packed)]
        plgpu.copy_gmem_to_smem(refs.q.at[row, head, block], target, s["q_full"].at[place])

        def step(i: Any, pages: list[Any]) -> list[Any]:
            ahead = _ids(shape, refs, row, first, tiles, i + 1)  # in flight while this tile waits for its slot
            offset = lax.rem(first + i, max(1, shape.page // shape.tile)) * shape.tile
            for part in range(shape.slots):
                _copy(shape, refs, done + i, part, pages, offset)
            return ahead

        lax.fori_loop(0, tiles, step, _ids(shape, refs, row, first, tiles, 0))

    total, items = each_item(shape, refs, one)
    # A block must not end before every arrival has been waited for: the last round of each barrier.
    for place in range(shape.queues):

        @pl.when(items > place)
        def _(place: int = place) -> None:
            plgpu.barrier_wait(s["q_free"].at[place])

    for slot in range(shape.stages):

        @pl.when(total * shape.slots > slot)
        def _(slot: int = slot) -> None:
            plgpu.barrier_wait(s["k_free"].at[slot])
            if not shape.latent:
                plgpu.barrier_wait(s["v_free"].at[slot])


def _ids(shape: Shape, refs: Refs, row: Any, first: Any, tiles: Any, tile: Any) -> list[Any]:
    """Page ids of a tile, beyond the last one those of the last; of the first where there is none."""
    at = first + jnp.maximum(jnp.minimum(tile, tiles - 1), 0)
    if shape.page >= shape.tile:
        return [refs.table[row, lax.div(at, shape.page // shape.tile)]]
    return [refs.table[row, at * shape.pages + j] for j in range(shape.pages)]


def _copy(shape: Shape, refs: Refs, tile: Any, part: int, pages: list[Any], offset: Any) -> None:
    """Keys and values of one slot: that `part` of the block's `tile`th tile, of `pages`, that begins at `offset` of a
    page."""
    s, slot, head = refs.s, shape.place(tile, part), 0 if shape.latent else lax.axis_index("head")
    rows = min(shape.slot, shape.page)
    for name, pool in (("k", refs.k),) if shape.latent else (("k", refs.k), ("v", refs.v)):

        @pl.when(tile * shape.slots >= shape.stages)
        def _(name: str = name) -> None:
            plgpu.barrier_wait(s[f"{name}_free"].at[slot])

        for j in range(shape.copies):
            page, begin = divmod(part * shape.slot + j * rows, min(shape.page, shape.tile))
            whole = shape.page <= shape.slot
            source = pool.at[pages[page], :, head] if whole else pool.at[pages[page], pl.ds(offset + begin, rows), head]
            plgpu.copy_gmem_to_smem(source, s[name].at[slot, pl.ds(j * rows, rows)], s[f"{name}_full"].at[slot])
