"""The kernel body of prefill attention: two warpgroups compute, a third (prefill_block.py) loads keys and values.

A block takes items in turn; an item is one tile of query tokens for `heads` query heads of one kv
head. Row r of a warpgroup's product is head r // span and token r % span of the warpgroup's part of
the tile. Queries are copied by TMA, head by head, into `stage`, whose rows may be any tokens, and
from there through registers into the tiling that products need; results leave the same way back.
Keys and values pass through a ring of `stages` tiles, one TMA copy per page.

Letters: M = 64 rows of a warpgroup, D head dim, B page size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import MASKED
from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.compat import plgpu
from pallas_kernels.mosaic.interpret import cast, fence, iota, is_interpreting, wgmma, wgmma_while
from pallas_kernels.ops.paged_attention.hopper.prefill_block import (
    GRID,
    ROLE,
    ROWS,
    WARPGROUPS,
    WIDE,
    Item,
    PrefillShape,
    Refs,
    drain,
    fetch_queries,
    find_item,
    produce,
)
from pallas_kernels.ops.paged_attention.hopper.softmax import HIDDEN, LOG2E, capped, unit_of

# mixed [M, columns], row maximum [M] in log2 units, row sum [M]; with `overlap` products of the next tile [M, keys]
State = tuple[jax.Array, ...]


def body(shape: PrefillShape) -> Callable[..., None]:
    """Return the kernel over the grid GRID and the threads ROLE."""

    def run(*arrays: Any, **scratch: Any) -> None:
        scales = () if shape.spec.quantized else (None, None)
        _block(shape, Refs(*arrays[:6], *scales, *arrays[6:], **scratch))

    return run


def _block(shape: PrefillShape, refs: Refs) -> None:
    role, block = lax.axis_index(ROLE), lax.axis_index(GRID)

    def rounds() -> jax.Array:
        return lax.div(refs.used[0] * shape.per_tile + (shape.blocks - 1), jnp.int32(shape.blocks))

    def item(turn: jax.Array) -> Item:
        # Alternate the order of blocks: the block with the longest item of a round gets the shortest of the next.
        there = lax.rem(turn, jnp.int32(2)) == 0
        return find_item(shape, refs, turn * shape.blocks + jnp.where(there, block, shape.blocks - 1 - block))

    @pl.when(role < WARPGROUPS)
    def _compute() -> None:
        if not is_interpreting(shape.interpret):
            plgpu.set_max_registers(208 if shape.spec.quantized else 232, action="increase")
        lax.fori_loop(0, rounds(), lambda turn, step: _consume(shape, refs, item(turn), role, step), jnp.int32(0))
        if shape.config.ahead:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(role == WARPGROUPS)
    def _copy() -> None:
        if not is_interpreting(shape.interpret):
            plgpu.set_max_registers(88 if shape.spec.quantized else 40, action="decrease")
        steps = lax.fori_loop(0, rounds(), lambda turn, step: produce(shape, refs, item(turn), step), jnp.int32(0))
        if is_interpreting(shape.interpret):
            drain(shape, refs, steps)


def _consume(shape: PrefillShape, refs: Refs, item: Item, role: jax.Array, step: jax.Array) -> jax.Array:
    # The same value, but unknown before the item is. Otherwise the addresses of queries and results are computed once
    # before the loop over items, and held in registers that the loop over keys lacks if heads are wide.
    here = role + jnp.minimum(item.row, 0) if shape.halves > 1 else role
    pl.when(item.tokens > 0)(partial(_queries, shape, refs, item, here))
    if shape.config.ping_pong:
        pl.when(role == 1)(partial(_hand_over, refs))
    raw = shape.scale * (refs.k_scale[item.kv_head(shape)] if shape.spec.quantized else 1.0)
    ahead = item.part(shape, role).offset - item.start * shape.config.keys
    group = _Warpgroup(shape, refs, item, role, step, raw)

    def loop(first: jax.Array, last: jax.Array, mask: bool, state: State, more: bool = True) -> State:
        end: State = lax.fori_loop(first, last, partial(group.tile, ahead if mask else None, more), state)
        return end

    if shape.config.overlap:
        before = jnp.maximum(item.steps - 1, 0)  # tiles with another one after them
        state = lax.fori_loop(0, jnp.minimum(item.steps, 1), group.first, _begin(shape))
        state = loop(jnp.int32(0), jnp.minimum(item.masked, before), True, state)
        state = loop(item.masked, before, False, state)
        # A mask does not harm a tile that needs none, and a fourth copy of the tile would.
        state = loop(before, item.steps, True, state, more=False)
    else:
        state = loop(jnp.int32(0), item.masked, True, _begin(shape))
        state = loop(item.masked, item.steps, False, state)
    if shape.config.ping_pong:
        pl.when(role == 0)(partial(_hand_over, refs))

    @pl.when(item.tokens > 0)
    def _results() -> None:
        _finish(shape, refs, item, here, state[:3])

    return step + item.steps


def _queries(shape: PrefillShape, refs: Refs, item: Item, role: jax.Array) -> None:
    """Load the item's queries into `q_s`: from `stage` if they are copied ahead, else from global memory."""
    for begin in range(0, shape.spec.dim, shape.columns):
        if not shape.config.ahead:
            fetch_queries(shape, refs, item, role, begin)
        plgpu.barrier_wait(refs.q_full.at[role])
        for c in range(0, shape.columns, WIDE):
            loaded = compat.load(refs.stage.at[role, c // WIDE], layout=_layout(), optimized=False)
            refs.q_s[role, :, pl.ds(begin + c, WIDE)] = loaded.astype(shape.spec.compute_dtype)
        plgpu.commit_smem()
        if shape.config.ahead:
            plgpu.barrier_arrive(refs.q_free.at[role])


def _hand_over(refs: Refs) -> None:
    """Hand the tensor core to the other warpgroup, and wait to get it back."""
    plgpu.barrier_arrive(refs.turn)
    plgpu.barrier_wait(refs.turn)


def _layout(reduced: bool = False) -> Any:
    return plgpu.Layout.WGMMA.reduce(1) if reduced else plgpu.Layout.WGMMA


def _begin(shape: PrefillShape) -> State:
    row = partial(cast, layout=_layout(reduced=True), interpret=shape.interpret)
    mixed = cast(jnp.zeros((ROWS, shape.columns), jnp.float32), _layout(), shape.interpret)
    start = mixed, row(jnp.full((ROWS,), MASKED, jnp.float32)), row(jnp.zeros((ROWS,), jnp.float32))
    if not shape.config.overlap:
        return start
    return *start, cast(jnp.zeros((ROWS, shape.config.keys), jnp.float32), _layout(), shape.interpret)


def _rows(x: jax.Array, columns: int) -> jax.Array:
    return lax.broadcast_in_dim(x, (ROWS, columns), [0])


@dataclass(frozen=True)
class _Warpgroup:
    """A warpgroup that computes its part of an item."""

    shape: PrefillShape
    refs: Refs
    item: Item
    role: jax.Array
    step: jax.Array  # tiles of keys of the items before
    raw: jax.Array | float  # turns products into scores

    def slot(self, tile: jax.Array) -> jax.Array:
        """Return the slot of a tile of keys, counted over all items."""
        return lax.rem(tile, jnp.int32(self.shape.config.stages))

    def tile(self, ahead: jax.Array | None, more: bool, j: jax.Array, state: State) -> State:
        """Attend to the j-th tile of keys.

        If the tile needs a mask, `ahead` is the first row's position relative to tile `start`, else
        None. With `overlap`, `state` ends with the products of this tile, and those of the next one,
        if there are `more`, are computed during the softmax of this one.
        """
        slot = self.slot(self.step + j)
        # The other warpgroup may continue as soon as the product is issued.
        issued: Callable[[], None] = partial(_hand_over, self.refs) if self.shape.config.ping_pong else lambda: None
        if not self.shape.config.overlap:
            score, _ = self.scores(slot, issued)
            return self.attend(slot, ahead, j, score, state)
        *mixture, score = state

        def current() -> State:
            issued()
            return self.attend(slot, ahead, j, score, tuple(mixture))

        if not more:
            return *current(), score
        after, mixture = self.scores(self.slot(self.step + j + 1), current)
        return *mixture, after

    def attend(self, slot: jax.Array, ahead: jax.Array | None, j: jax.Array, score: jax.Array, state: State) -> State:
        """Add the values of the j-th tile, in `slot`, with the weights of its products `score`."""
        shape, config, refs, (mixed, peak, total) = self.shape, self.shape.config, self.refs, state
        factor = unit_of(self.raw, shape.softcap)  # scores in log2 units, so that exp2 follows one multiply-add
        if shape.softcap is not None:
            score = capped(score, self.raw, shape.softcap)
        if ahead is not None:
            # Without a window only the tail is masked, and with `overlap` also the last tile, wherever it is.
            there = j if shape.window is None and not config.overlap else self.item.key_tile(j)
            score = _mask(shape, score, ahead - there * config.keys)
        higher = jnp.maximum(peak, jnp.max(score, axis=1) * factor)
        fade = jnp.exp2(peak - higher)
        weight = jnp.exp2(score * factor - _rows(higher, config.keys))
        mixed, total = mixed * _rows(fade, shape.columns), total * fade + jnp.sum(weight, axis=1)
        narrow = weight.astype(shape.spec.compute_dtype)
        if config.p_in_smem:
            refs.p_s[self.role] = narrow
            plgpu.commit_smem()
        elif config.ping_pong:
            mixed, total, higher, narrow = lax.optimization_barrier((mixed, total, higher, narrow))

        if config.ping_pong:
            plgpu.barrier_arrive(refs.turn)
        plgpu.barrier_wait(refs.v_full.at[slot])
        if config.ping_pong:
            plgpu.barrier_wait(refs.turn)
        left = refs.p_s.at[self.role] if config.p_in_smem else narrow
        mixed = wgmma(left, refs.v_s.at[slot], mixed, interpret=shape.interpret)
        fence(shape.interpret)
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return mixed, higher, total

    def scores(self, slot: jax.Array, meanwhile: Callable[[], Any]) -> tuple[jax.Array, Any]:
        """Compute q k^T [M, keys] of a tile, and the result of `meanwhile` while the tensor core works."""
        refs, interpret = self.refs, self.shape.interpret
        plgpu.barrier_wait(refs.k_full.at[slot])
        q, k = refs.q_s.at[self.role], refs.k_s.at[slot]
        products = wgmma_while(q, k, meanwhile, transposed=True, interpret=interpret)
        fence(interpret)
        plgpu.barrier_arrive(refs.k_free.at[slot])
        return products

    def first(self, j: jax.Array, state: State) -> State:
        """Compute the products of the first tile, which no softmax can hide."""
        score, _ = self.scores(self.slot(self.step + j), lambda: ())
        return *state[:-1], score


def _mask(shape: PrefillShape, score: jax.Array, ahead: jax.Array) -> jax.Array:
    """Mask keys that a row may not attend to; `ahead`: the first row's position minus the first key's."""
    row, column = _iota(shape, (ROWS,), 0), _iota(shape, (ROWS, shape.config.keys), 1)
    last = ahead + (
        row if shape.config.heads == 1 else row & (shape.span - 1)
    )  # the last key that a row sees, as a column
    # A thread's columns are 8 i + 0, 1 plus its offset. Split this way, the compiler turns 8 i and 0, 1 into constants
    # and a few sums. Whole column numbers would take a register each, beside the loop's, and spill.
    eighth, past = column & ~7, _rows(last, shape.config.keys) - (column & 7)
    score = jnp.where(eighth <= past, score, HIDDEN)
    return score if shape.window is None else jnp.where(eighth > past - shape.window, score, HIDDEN)


def _iota(shape: PrefillShape, size: tuple[int, ...], axis: int) -> jax.Array:
    return iota(size, axis, _layout(reduced=len(size) == 1), shape.interpret)


def _finish(shape: PrefillShape, refs: Refs, item: Item, role: jax.Array, state: State) -> None:
    mixed, peak, total = state
    total = jnp.maximum(total, 1e-30)  # rows that are not stored have none
    share = (refs.v_scale[item.kv_head(shape)] if shape.spec.quantized else 1.0) / total
    mixed = (mixed * _rows(share, shape.columns)).astype(shape.spec.dtype)
    if shape.config.ahead:  # the results of the item before have left
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    stored = refs.stored if shape.config.ahead else refs.stage
    for c in range(0, shape.columns, WIDE):
        stored[role, c // WIDE] = mixed[:, c : c + WIDE]
    plgpu.commit_smem()

    def tell() -> None:
        refs.lse[item.head_block, item.tile, pl.ds(role * ROWS, ROWS)] = peak * (1.0 / LOG2E) + jnp.log(total)

    if shape.halves > 1:
        pl.when(item.half == 0)(tell)
    else:
        tell()
    _store(shape, refs, item, role, stored)


def _store(shape: PrefillShape, refs: Refs, item: Item, role: jax.Array, stored: Any) -> None:
    """Copy the results in `stored` to global memory.

    Copies have fixed sizes, so the tokens are stored as a sum of powers of two.
    """
    part = item.part(shape, role)
    first = item.half * shape.columns if shape.halves > 1 else 0
    done, size = part.left * 0, shape.span
    while size:

        @pl.when((part.left & size) != 0)
        def _copy(size: int = size, done: jax.Array = done) -> None:
            for h, c in product(range(shape.config.heads), range(0, shape.columns, WIDE)):
                plgpu.copy_smem_to_gmem(
                    stored.at[role, c // WIDE, pl.ds(h * shape.span + part.back + done, size)],
                    refs.out.at[
                        pl.ds(part.begin + done, size), item.head_block * shape.config.heads + h, pl.ds(first + c, WIDE)
                    ],
                )

        done, size = done + (part.left & size), size // 2
    if not shape.config.ahead:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
