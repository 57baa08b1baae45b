"""The blocks of decode attention: one producer warpgroup feeds tiles of keys and values to one or two consumers.

A block is one worker of the plan for one kv head (and one group of query tokens, where they are more than M rows hold).
Its producer walks through the items of the worker and copies, page by page, their tiles into a ring of `stages` slots,
without a pause from item to item. Consumer c takes every tile g with g % consumers == c, counted over all items, so a
slot belongs to one consumer for good. Each consumer writes its own partial result of each item: mixed values, already
divided by their weight, and the log2 of that weight; `combine.py` puts them together.

Letters: M rows of the product (query tokens times G, padded), C = tokens of keys in a tile, D head dim, B page size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat
from pallas_kernels.compat import plgpu
from pallas_kernels.hopper.prefill_shape import LEAST
from pallas_kernels.interpret import Interpret, cast, fence, is_interpreting, mma, wgmma
from pallas_kernels.layout import MASKED

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Shape:
    """All that is static about the blocks."""

    rows: int  # M
    packed: int  # rows of q that are copied; the others hold what was there, and are not read in the end
    group: int  # G
    block: int  # query tokens in a block
    dim: int
    page: int
    tile: int  # C
    stages: int
    consumers: int
    dtype: Any  # of the products
    kv_dtype: Any  # of the pools
    warps: bool  # products of warps (mma), not of the warpgroup (wgmma)
    p_in_smem: bool
    scale: float
    window: int | None
    softcap: float | None
    scaled: bool
    interpret: Interpret

    @property
    def quantised(self) -> bool:
        return bool(self.kv_dtype != self.dtype)

    @property
    def pages(self) -> int:
        """Pages, or the part of one, that make up a tile: copies, and arrivals at its barrier."""
        return max(1, self.tile // self.page)

    def layout(self, operand: str, dtype: Any = None) -> Any:
        """Registers of an operand of the product: "LHS", "RHS" or "ACC"."""
        if not self.warps:
            return plgpu.Layout.WGMMA
        return getattr(plgpu.Layout, f"MMA_{operand}")(dtype or self.dtype, m_warps=min(4, self.rows // 16))

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers of a block."""
        ring = (self.stages, self.tile, self.dim)
        memory = {
            "q": _tiled((2, self.rows, self.dim), self.dtype),
            "k": _tiled(ring, self.kv_dtype),
            "v": _tiled(ring, self.kv_dtype),
        }
        if self.warps or self.p_in_smem:
            memory["p"] = _tiled((self.consumers, self.rows, self.tile), self.dtype)
        if self.quantised:
            memory["wide"] = _tiled((self.consumers, self.tile, self.dim), self.dtype)
        barriers = {
            "q_full": plgpu.Barrier(num_arrivals=1, num_barriers=2),
            "q_free": plgpu.Barrier(num_arrivals=self.consumers, num_barriers=2),
            "k_full": plgpu.Barrier(num_arrivals=self.pages, num_barriers=self.stages),
            "v_full": plgpu.Barrier(num_arrivals=self.pages, num_barriers=self.stages),
            "k_free": plgpu.Barrier(num_arrivals=1, num_barriers=self.stages),
            "v_free": plgpu.Barrier(num_arrivals=1, num_barriers=self.stages),
        }
        return memory | barriers


def _tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as TMA and the tensor cores like it: 8 rows of up to 128 bytes, swizzled."""
    swizzle = min(128, shape[-1] * jnp.dtype(dtype).itemsize)
    transforms = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


@dataclass(frozen=True)
class Refs:
    """What a block reads and writes in global memory, and its scratch by name."""

    q: Any  # [S, K, blocks, packed, D]
    k: Any  # [N, B, K, D]
    v: Any
    table: Any  # [S, P']
    row: Any  # [I]
    first: Any  # [I]
    tiles: Any  # [I]
    cuts: Any  # [workers + 1]
    lengths: Any  # [S]
    contexts: Any  # [S]
    k_scale: Any  # [K] or None
    v_scale: Any
    mixed: Any  # [I * consumers, K, blocks, M, D] float32
    weight: Any  # [I * consumers, K, blocks, M] float32
    s: dict[str, Any]


def body(shape: Shape) -> Callable[..., None]:
    """The kernel over the grid (worker, block, head), threads `role`: consumers first, then the producer."""

    def run(*arrays: Any, **scratch: Any) -> None:
        inputs, scales, outputs = arrays[:10], arrays[10:-2], arrays[-2:]
        fields: list[Any] = [*inputs, *(scales or (None, None)), *outputs, scratch]
        refs = Refs(*fields)
        role = lax.axis_index("role")

        @pl.when(role < shape.consumers)
        def _() -> None:
            _registers(shape, consumer=True)
            _consume(shape, refs, role)

        @pl.when(role == shape.consumers)
        def _() -> None:
            _registers(shape, consumer=False)
            _produce(shape, refs)

    return run


def _registers(shape: Shape, *, consumer: bool) -> None:
    if shape.warps:  # these blocks need so few that two of them share a core; there are none to move
        return
    if consumer:
        plgpu.set_max_registers(248 if shape.consumers == 1 else 232, action="increase")
    else:
        plgpu.set_max_registers(40, action="decrease")


def _each_item(shape: Shape, refs: Refs, one: Callable[[Any, Any, Any, Any, Any], None]) -> tuple[Any, Any]:
    """one(item, its number in this worker, row, tiles, tiles before it) for each item; how many tiles, items it was."""
    worker, block = lax.axis_index("worker"), lax.axis_index("block")
    begin, end = refs.cuts[worker], refs.cuts[worker + 1]

    def step(item: Any, done: Any) -> Any:
        row = refs.row[item]
        # Query tokens of this block that the row does not have need no keys.
        tiles = jnp.where(block * shape.block < refs.lengths[row], refs.tiles[item], 0)
        one(item, item - begin, row, tiles, done)
        return done + tiles

    return lax.fori_loop(begin, end, step, jnp.int32(0)), end - begin


def _produce(shape: Shape, refs: Refs) -> None:
    s, block, head = refs.s, lax.axis_index("block"), lax.axis_index("head")

    def one(item: Any, number: Any, row: Any, tiles: Any, done: Any) -> None:
        first = refs.first[item]
        half = lax.rem(number, 2)

        @pl.when(number >= 2)
        def _() -> None:
            plgpu.barrier_wait(s["q_free"].at[half])

        target = s["q"].at[half] if shape.packed == shape.rows else s["q"].at[half, pl.ds(0, shape.packed)]
        plgpu.copy_gmem_to_smem(refs.q.at[row, head, block], target, s["q_full"].at[half])

        def ids(tile: Any) -> list[Any]:
            """Page ids of a tile, beyond the last one those of the last; of the first where there is none."""
            at = first + jnp.maximum(jnp.minimum(tile, tiles - 1), 0)
            if shape.page >= shape.tile:
                return [refs.table[row, lax.div(at, shape.page // shape.tile)]]
            return [refs.table[row, at * shape.pages + j] for j in range(shape.pages)]

        def copy(
            pool: Any, slots: Any, full: Any, free: Any, slot: Any, pages: list[Any], offset: Any, wait: Any
        ) -> None:
            @pl.when(wait)
            def _() -> None:
                plgpu.barrier_wait(free.at[slot])

            rows = min(shape.tile, shape.page)
            for j, page in enumerate(pages):
                source = pool.at[page, pl.ds(offset, rows), head] if shape.page > shape.tile else pool.at[page, :, head]
                plgpu.copy_gmem_to_smem(source, slots.at[slot, pl.ds(j * rows, rows)], full.at[slot])

        def step(i: Any, pages: list[Any]) -> list[Any]:
            ahead = ids(i + 1)  # in flight while this tile waits for its slot
            slot = lax.rem(done + i, shape.stages)
            offset = lax.rem(first + i, max(1, shape.page // shape.tile)) * shape.tile
            wait = done + i >= shape.stages
            copy(refs.k, s["k"], s["k_full"], s["k_free"], slot, pages, offset, wait)
            copy(refs.v, s["v"], s["v_full"], s["v_free"], slot, pages, offset, wait)
            return ahead

        lax.fori_loop(0, tiles, step, ids(0))

    total, items = _each_item(shape, refs, one)
    # A block must not end before every arrival has been waited for: the last round of each barrier.
    for half in range(2):

        @pl.when(items > half)
        def _(half: int = half) -> None:
            plgpu.barrier_wait(s["q_free"].at[half])

    for slot in range(shape.stages):

        @pl.when(total > slot)
        def _(slot: int = slot) -> None:
            plgpu.barrier_wait(s["k_free"].at[slot])
            plgpu.barrier_wait(s["v_free"].at[slot])


def _consume(shape: Shape, refs: Refs, me: Any) -> None:
    s, block, head = refs.s, lax.axis_index("block"), lax.axis_index("head")
    acc_layout = shape.layout("ACC", jnp.float32 if shape.warps else None)

    def full(value: float, dims: tuple[int, ...], layout: Any) -> jax.Array:
        return cast(jnp.full(dims, value, jnp.float32), layout, shape.interpret)

    # Scores times `unit` are in powers of two. A soft cap bends them in natural units first.
    raw = shape.scale * (refs.k_scale[head] if shape.scaled else 1.0)
    unit = LOG2E if shape.softcap else raw * LOG2E

    def one(item: Any, number: Any, row: Any, tiles: Any, done: Any) -> None:
        first = refs.first[item]
        half = lax.rem(number, 2)
        plgpu.barrier_wait(s["q_full"].at[half])
        q = s["q"].at[half]
        if shape.warps:
            q = compat.load(q, shape.layout("LHS"), optimized=False)
        # Position of the block's first query token; its token t may see up to t further.
        position = refs.contexts[row] - refs.lengths[row] + block * shape.block

        def step(j: Any, carry: Any) -> Any:
            acc, peak, total = carry
            tile = mine + j * shape.consumers
            slot = lax.rem(done + tile, shape.stages)
            plgpu.barrier_wait(s["k_full"].at[slot])
            score = _scores(shape, s, q, slot, me)
            score = _mask(shape, score, (first + tile) * shape.tile, position, raw, acc_layout)
            top = jnp.maximum(peak, jnp.max(score, axis=1) * unit)
            weight = jnp.exp2(score * unit - lax.broadcast_in_dim(top, score.shape, (0,)))
            fade = jnp.exp2(peak - top)
            # Of warp products a row lies over four warps, which would have to meet to sum it: once per item will do.
            if shape.warps:
                total = total * lax.broadcast_in_dim(fade, total.shape, (0,)) + weight
            else:
                total = total * fade + jnp.sum(weight, axis=1)
            acc = acc * lax.broadcast_in_dim(fade, acc.shape, (0,))
            acc = _mix(shape, s, acc, weight.astype(shape.dtype), slot, me)
            return acc, top, total

        # The first of my tiles in this item, tiles counted over all items.
        mine = (
            lax.rem(me + shape.consumers - lax.rem(done, shape.consumers), shape.consumers)
            if shape.consumers > 1
            else 0
        )
        mine = jnp.int32(mine)
        count = lax.div(tiles - mine + (shape.consumers - 1), shape.consumers)
        start = (
            full(0.0, (shape.rows, shape.dim), acc_layout),
            # Not MASKED: of a tile that a row sees nothing of, that times `unit` would be the highest score, and where
            # a multiply-add rounds once and that product twice, its weight 2 to the power of 1e22.
            full(LEAST, (shape.rows,), acc_layout.reduce(1)),
            full(0.0, (shape.rows, shape.tile), acc_layout)
            if shape.warps
            else full(0.0, (shape.rows,), acc_layout.reduce(1)),
        )
        acc, peak, total = lax.fori_loop(0, count, step, start)
        total = jnp.sum(total, axis=1) if shape.warps else total
        _release(shape, s["q_free"].at[half])
        safe = jnp.maximum(total, 1e-30)
        factor = (refs.v_scale[head] if shape.scaled else 1.0) / safe
        part = item * shape.consumers + me
        refs.mixed[part, head, block] = acc * lax.broadcast_in_dim(factor, acc.shape, (0,))
        refs.weight[part, head, block] = jnp.where(total > 0, peak + jnp.log(safe) * LOG2E, MASKED)

    _each_item(shape, refs, one)


def _scores(shape: Shape, s: dict[str, Any], q: Any, slot: Any, me: Any) -> jax.Array:
    """q k^T [M, C], unscaled; the slot of keys is free again."""
    keys = s["k"].at[slot]
    if shape.quantised:
        keys = _widen(shape, s, "k", slot, me)
    if shape.warps:
        zeros = cast(
            jnp.zeros((shape.rows, shape.tile), jnp.float32), shape.layout("ACC", jnp.float32), shape.interpret
        )
        if is_interpreting(shape.interpret):
            score = mma(zeros, q, keys[...].T, shape.interpret)
        else:
            right = compat.load(compat.transpose(keys), shape.layout("RHS"), optimized=False)
            score = mma(zeros, q, right, shape.interpret)
    else:
        score = wgmma(q, keys, transposed=True, interpret=shape.interpret)
    if not shape.quantised:
        _release(shape, s["k_free"].at[slot])
    return score


def _mix(shape: Shape, s: dict[str, Any], acc: jax.Array, weight: jax.Array, slot: Any, me: Any) -> jax.Array:
    """acc + weight v [M, D]; the slot of values is free again."""
    left: Any = weight
    if "p" in s:
        s["p"][me] = weight
        left = s["p"].at[me]
        if not shape.warps:  # those read it as it was written, by ordinary loads
            plgpu.commit_smem()
    plgpu.barrier_wait(s["v_full"].at[slot])
    values = s["v"].at[slot]
    if shape.quantised:
        values = _widen(shape, s, "v", slot, me)
    if shape.warps:
        left = compat.load(left, shape.layout("LHS"), optimized=False)
        right = compat.load(values, shape.layout("RHS"), optimized=False)
        acc = mma(acc, left, right, shape.interpret)
    else:
        acc = wgmma(left, values, acc, interpret=shape.interpret)
    if not shape.quantised:
        _release(shape, s["v_free"].at[slot])
    return acc


def _release(shape: Shape, free: Any) -> None:
    if shape.warps:
        plgpu.commit_smem()  # ordinary loads have read the slot, TMA writes it next
    else:
        fence(shape.interpret)
    plgpu.barrier_arrive(free)


def _widen(shape: Shape, s: dict[str, Any], name: str, slot: Any, me: Any) -> Any:
    """A slot of 8-bit values in the dtype of the products, in shared memory; the slot is free again."""
    wide = s["wide"].at[me]
    if is_interpreting(shape.interpret):
        narrow = s[name][slot]
    else:
        narrow = compat.load(s[name].at[slot], plgpu.Layout.WGMMA_UPCAST_2X)
    s["wide"][me] = cast(narrow.astype(shape.dtype), plgpu.Layout.WGMMA, shape.interpret)
    plgpu.commit_smem()
    plgpu.barrier_arrive(s[f"{name}_free"].at[slot])
    return wide


def _mask(shape: Shape, score: jax.Array, key: Any, position: Any, raw: Any, layout: Any) -> jax.Array:
    """Soft cap, then MASKED where row r, of query token position + r // G, may not see key + c."""
    if shape.softcap:
        # tanh(x) = 1 - 2 / (e^2x + 1): the hardware's own tanh is good to 11 bits only.
        grown = jnp.exp2(score * (raw * 2 * LOG2E / shape.softcap))
        score = shape.softcap - (2 * shape.softcap) / (grown + 1.0)

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
