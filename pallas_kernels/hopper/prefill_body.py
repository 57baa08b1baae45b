"""What one block of prefill attention does: two warpgroups compute, a third copies pages into shared memory.

A block takes items in turn; an item is one tile of query tokens for `heads` query heads of one kv head. Row r of a
warpgroup's product is head r // span, token r % span of the tile's part for that warpgroup. Queries come by one TMA per
head into `stage`, whose rows may start at any token, and from there, through registers, into the tiling that the products
need; results leave the same way back. Keys and values run through a ring of `stages` tiles, one TMA per page.

M = 64 rows of a warpgroup, D head dim, B page size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat
from pallas_kernels.compat import plgpu
from pallas_kernels.interpret import Interpret, cast, fence, is_interpreting, wgmma
from pallas_kernels.layout import MASKED

ROWS = 64  # M, the least of a warpgroup's product
WARPGROUPS = 2  # that compute
LOG2E = math.log2(math.e)
GRID, ROLE = "block", "role"


@dataclass(frozen=True)
class Shape:
    """Everything static that the body needs to know."""

    tokens: int  # T, at least `span`
    group: int  # G
    kv_heads: int  # K
    dim: int  # D
    page: int  # B
    heads: int  # query heads of an item
    keys: int  # tokens of keys at a time
    stages: int
    blocks: int
    tiles: int  # I, of the plan
    p_in_smem: bool
    ping_pong: bool
    dtype: Any
    scale: float
    window: int | None
    softcap: float | None
    interpret: Interpret

    @property
    def span(self) -> int:
        """Tokens of a warpgroup."""
        return ROWS // self.heads

    @property
    def head_blocks(self) -> int:
        return self.kv_heads * self.group // self.heads

    @property
    def copies(self) -> int:
        """TMA copies for a tile of keys."""
        return max(1, self.keys // self.page)

    def scratch(self) -> list[Any]:
        ring = plgpu.SMEM((self.stages, self.keys, self.dim), self.dtype, transforms=_tiled(self.dim, self.dtype))
        weights = self.keys if self.p_in_smem else 16  # columns; of no use where they stay in registers
        free = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=self.stages)
        full = plgpu.Barrier(num_arrivals=self.copies, num_barriers=self.stages)
        product = (WARPGROUPS, ROWS, self.dim)
        return [
            plgpu.SMEM(product, self.dtype, transforms=_tiled(self.dim, self.dtype)),
            plgpu.SMEM(product, self.dtype),  # inferred: rows that can be copied to and from any token
            ring,
            ring,
            plgpu.SMEM((WARPGROUPS, ROWS, weights), self.dtype, transforms=_tiled(weights, self.dtype)),
            plgpu.Barrier(num_arrivals=self.heads, num_barriers=WARPGROUPS),
            *(full, full, free, free),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ]


def _tiled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """The tiling of a product's operand in shared memory."""
    width = min(columns, 128 // jnp.dtype(dtype).itemsize)
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * jnp.dtype(dtype).itemsize)


class Refs(NamedTuple):
    """Arguments, results and scratch, in the order in which the kernel gets them."""

    q: Any  # [T, H, D]
    k: Any  # [N, B, K, D]
    v: Any  # [N, B, K, D]
    row: Any  # [I] and so on: the fields of PrefillWork
    begin: Any
    count_tokens: Any
    position: Any
    count: Any  # [1]
    table: Any  # [S, P']
    out: Any  # [T, H, D]
    lse: Any  # [head blocks, I, 2 M] float32, natural log
    q_s: Any  # [2, M, D]
    stage: Any  # [2, M, D]
    k_s: Any  # [stages, keys, D]
    v_s: Any  # [stages, keys, D]
    p_s: Any  # [2, M, keys]
    q_full: Any  # barriers
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    turn: Any


class Item(NamedTuple):
    """One tile of tokens for one block of heads; scalars."""

    tile: jax.Array
    head_block: jax.Array
    row: jax.Array
    begin: jax.Array
    tokens: jax.Array  # 0 where there is nothing to do
    position: jax.Array
    low: jax.Array  # tiles of keys from `low` to `high`; those in between `whole` and `end` need no mask
    whole: jax.Array
    end: jax.Array
    high: jax.Array


State = tuple[jax.Array, jax.Array, jax.Array]  # mixed [M, D], peak [M] in log2 units, total [M]


def body(shape: Shape) -> Callable[..., None]:
    """The kernel's body."""

    def run(*refs: Any) -> None:
        _block(shape, Refs(*refs))

    return run


def _block(shape: Shape, refs: Refs) -> None:
    role, block = lax.axis_index(ROLE), lax.axis_index(GRID)

    def rounds() -> jax.Array:
        return lax.div(refs.count[0] * shape.head_blocks + (shape.blocks - 1), jnp.int32(shape.blocks))

    def item(turn: jax.Array) -> Item:
        # Back and forth over the blocks: who has the longest of one round has the shortest of the next.
        there = lax.rem(turn, jnp.int32(2)) == 0
        return _item(shape, refs, turn * shape.blocks + jnp.where(there, block, shape.blocks - 1 - block))

    @pl.when(role < WARPGROUPS)
    def _compute() -> None:
        if not is_interpreting(shape.interpret):
            plgpu.set_max_registers(232, action="increase")
        lax.fori_loop(0, rounds(), lambda turn, step: _consume(shape, refs, item(turn), role, step), jnp.int32(0))

    @pl.when(role == WARPGROUPS)
    def _copy() -> None:
        if not is_interpreting(shape.interpret):
            plgpu.set_max_registers(40, action="decrease")
        steps = lax.fori_loop(0, rounds(), lambda turn, step: _produce(shape, refs, item(turn), step), jnp.int32(0))
        for slot in range(shape.stages):  # a block must not end before its barriers are waited for

            @pl.when(steps > slot)
            def _drain(slot: int = slot) -> None:
                plgpu.barrier_wait(refs.k_free.at[slot])
                plgpu.barrier_wait(refs.v_free.at[slot])


def _item(shape: Shape, refs: Refs, index: jax.Array) -> Item:
    tile = jnp.minimum(lax.div(index, jnp.int32(shape.head_blocks)), shape.tiles - 1)
    tokens = jnp.where(index < refs.count[0] * shape.head_blocks, refs.count_tokens[tile], 0)
    position = refs.position[tile]
    last, keys = position + tokens - 1, jnp.int32(shape.keys)
    high = jnp.where(tokens > 0, lax.div(last, keys) + 1, 0)
    low = whole = jnp.int32(0) * tile
    end = jnp.minimum(lax.div(position + 1, keys), high)
    if shape.window is not None:
        low = jnp.minimum(lax.div(jnp.maximum(position - shape.window + 1, 0), keys), high)
        whole = lax.div(jnp.maximum(last - shape.window + 1, 0) + (keys - 1), keys)
        whole = jnp.minimum(jnp.maximum(whole, low), high)
        end = jnp.maximum(end, whole)
    return Item(
        tile, lax.rem(index, jnp.int32(shape.head_blocks)), refs.row[tile], refs.begin[tile], tokens, position,
        low, whole, end, high,
    )  # fmt: skip


# The warpgroup that copies.


def _produce(shape: Shape, refs: Refs, item: Item, step: jax.Array) -> jax.Array:
    head = lax.div(item.head_block * shape.heads, jnp.int32(shape.group))

    def copy(i: jax.Array, step: jax.Array) -> jax.Array:
        slot = lax.rem(step, jnp.int32(shape.stages))
        for pool, ring, full, free in (
            (refs.k, refs.k_s, refs.k_full, refs.k_free),
            (refs.v, refs.v_s, refs.v_full, refs.v_free),
        ):

            @pl.when(step >= shape.stages)
            def _wait(free: Any = free) -> None:
                plgpu.barrier_wait(free.at[slot])

            for j in range(shape.copies):
                size = min(shape.page, shape.keys)
                source = _keys(shape, refs, pool, item.row, i, j, head)
                plgpu.copy_gmem_to_smem(source, ring.at[slot, pl.ds(j * size, size)], full.at[slot])
        return step + 1

    return lax.fori_loop(item.low, item.high, copy, step)


def _keys(shape: Shape, refs: Refs, pool: Any, row: jax.Array, i: jax.Array, j: int, head: jax.Array) -> Any:
    """Page j of tile i of the row's keys, or tile i as a part of its page."""
    if shape.page <= shape.keys:
        return pool.at[refs.table[row, i * shape.copies + j], :, head]
    parts = jnp.int32(shape.page // shape.keys)
    return pool.at[refs.table[row, lax.div(i, parts)], pl.ds(lax.rem(i, parts) * shape.keys, shape.keys), head]


# The warpgroups that compute.


def _consume(shape: Shape, refs: Refs, item: Item, role: jax.Array, step: jax.Array) -> jax.Array:
    begin = item.begin + role * shape.span
    # A copy must lie within the tokens: the last ones of the step are read from further back.
    back = jnp.maximum(begin + shape.span - shape.tokens, 0)
    head = item.head_block * shape.heads

    @pl.when(item.tokens > 0)
    def _queries() -> None:
        @pl.loop(0, shape.heads)
        def _copy(h: jax.Array) -> None:
            plgpu.copy_gmem_to_smem(
                refs.q.at[pl.ds(begin - back, shape.span), head + h],
                refs.stage.at[role, pl.ds(h * shape.span, shape.span)],
                refs.q_full.at[role],
            )

        plgpu.barrier_wait(refs.q_full.at[role])
        refs.q_s[role] = compat.load(refs.stage.at[role], layout=_layout(), optimized=False)
        plgpu.commit_smem()

    if shape.ping_pong:
        pl.when(role == 1)(partial(_hand_over, refs))
    offset = item.position + role * shape.span - back
    tile = partial(_tile, shape, refs, role, step - item.low)
    state = _begin(shape)
    if shape.window is not None:
        state = lax.fori_loop(item.low, item.whole, partial(tile, offset), state)
    state = lax.fori_loop(item.low if shape.window is None else item.whole, item.end, partial(tile, None), state)
    state = lax.fori_loop(item.end, item.high, partial(tile, offset), state)
    if shape.ping_pong:
        pl.when(role == 0)(partial(_hand_over, refs))

    @pl.when(item.tokens > 0)
    def _results() -> None:
        left = jnp.clip(item.tokens - role * shape.span, 0, shape.span)
        _finish(shape, refs, item, role, state, begin, back, left)

    return step + item.high - item.low


def _hand_over(refs: Refs) -> None:
    """Let the other warpgroup have the tensor core, and wait until it does the same."""
    plgpu.barrier_arrive(refs.turn)
    plgpu.barrier_wait(refs.turn)


def _layout(reduced: bool = False) -> Any:
    return plgpu.Layout.WGMMA.reduce(1) if reduced else plgpu.Layout.WGMMA


def _begin(shape: Shape) -> State:
    row = partial(cast, layout=_layout(reduced=True), interpret=shape.interpret)
    mixed = cast(jnp.zeros((ROWS, shape.dim), jnp.float32), _layout(), shape.interpret)
    return mixed, row(jnp.full((ROWS,), MASKED, jnp.float32)), row(jnp.zeros((ROWS,), jnp.float32))


def _rows(x: jax.Array, columns: int) -> jax.Array:
    return lax.broadcast_in_dim(x, (ROWS, columns), [0])


def _tile(
    shape: Shape, refs: Refs, role: jax.Array, ahead: jax.Array, offset: jax.Array | None, i: jax.Array, state: State
) -> State:
    """Attend to tile i of the keys; `offset`, the position of the warpgroup's first token, where it needs a mask."""
    mixed, peak, total = state
    slot = lax.rem(ahead + i, jnp.int32(shape.stages))
    plgpu.barrier_wait(refs.k_full.at[slot])
    score = _scores(shape, refs, role, slot)
    fence(shape.interpret)
    plgpu.barrier_arrive(refs.k_free.at[slot])

    factor = shape.scale * LOG2E  # scores in units of log2, so that exp2 takes them after one multiply-add
    if shape.softcap is not None:
        score, factor = jnp.tanh(score * (shape.scale / shape.softcap)), shape.softcap * LOG2E
    if offset is not None:
        score = jnp.where(_seen(shape, offset, i * shape.keys), score, MASKED)
    higher = jnp.maximum(peak, jnp.max(score, axis=1) * factor)
    fade = jnp.exp2(peak - higher)
    weight = jnp.exp2(score * factor - _rows(higher, shape.keys))
    mixed, total = mixed * _rows(fade, shape.dim), total * fade + jnp.sum(weight, axis=1)
    narrow = weight.astype(shape.dtype)
    if shape.p_in_smem:
        refs.p_s[role] = narrow
        plgpu.commit_smem()
    elif shape.ping_pong:
        mixed, total, higher, narrow = lax.optimization_barrier((mixed, total, higher, narrow))

    if shape.ping_pong:
        plgpu.barrier_arrive(refs.turn)
    plgpu.barrier_wait(refs.v_full.at[slot])
    if shape.ping_pong:
        plgpu.barrier_wait(refs.turn)
    left = refs.p_s.at[role] if shape.p_in_smem else narrow
    mixed = wgmma(left, refs.v_s.at[slot], mixed, interpret=shape.interpret)
    fence(shape.interpret)
    plgpu.barrier_arrive(refs.v_free.at[slot])
    return mixed, higher, total


def _scores(shape: Shape, refs: Refs, role: jax.Array, slot: jax.Array) -> jax.Array:
    """q k^T [M, keys]. The other warpgroup may go on as soon as the product is issued."""
    if is_interpreting(shape.interpret) and not compat.DETECTS_RACES:
        score = wgmma(refs.q_s.at[role], refs.k_s.at[slot], transposed=True, interpret=shape.interpret)
        if shape.ping_pong:
            _hand_over(refs)
        return score

    def product(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, refs.q_s.at[role], compat.transpose(refs.k_s.at[slot]))
        if shape.ping_pong:
            _hand_over(refs)
        score: jax.Array = acc[...]
        return score

    scores: jax.Array = pl.run_scoped(product, plgpu.ACC((ROWS, shape.keys), jnp.float32))
    return scores


def _seen(shape: Shape, offset: jax.Array, key: jax.Array) -> jax.Array:
    """Which of the keys from `key` on each row may attend to, bool [M, keys]."""
    row = _iota(shape, (ROWS,), 0)
    # The last key that a row sees, as a column: per row, so that nothing per element outlives a turn of the loop.
    last = offset - key + (row if shape.heads == 1 else row & (shape.span - 1))
    column = _iota(shape, (ROWS, shape.keys), 1)
    seen = column <= _rows(last, shape.keys)
    return seen if shape.window is None else seen & (column > _rows(last - shape.window, shape.keys))


def _iota(shape: Shape, size: tuple[int, ...], axis: int) -> jax.Array:
    if is_interpreting(shape.interpret) and not compat.DETECTS_RACES:
        return lax.broadcasted_iota(jnp.int32, size, axis)
    counted: jax.Array = plgpu.broadcasted_iota(jnp.int32, size, axis, layout=_layout(reduced=len(size) == 1))
    return counted


def _finish(
    shape: Shape,
    refs: Refs,
    item: Item,
    role: jax.Array,
    state: State,
    begin: jax.Array,
    back: jax.Array,
    left: jax.Array,
) -> None:
    """Store `left` tokens from token `begin` on; in `stage` they stand `back` rows below their head's first."""
    mixed, peak, total = state
    refs.stage[role] = (mixed * _rows(1.0 / total, shape.dim)).astype(shape.dtype)
    plgpu.commit_smem()
    refs.lse[item.head_block, item.tile, pl.ds(role * ROWS, ROWS)] = peak * (1.0 / LOG2E) + jnp.log(total)
    # A copy has a fixed size: a number of tokens goes out as the powers of two that it is the sum of.
    done, size = left * 0, shape.span
    while size:

        @pl.when((left & size) != 0)
        def _copy(size: int = size, done: jax.Array = done) -> None:
            @pl.loop(0, shape.heads)
            def _head(h: jax.Array) -> None:
                plgpu.copy_smem_to_gmem(
                    refs.stage.at[role, pl.ds(h * shape.span + back + done, size)],
                    refs.out.at[pl.ds(begin + done, size), item.head_block * shape.heads + h],
                )

        done, size = done + (left & size), size // 2
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
