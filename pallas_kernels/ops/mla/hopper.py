"""Multi-head latent attention (MLA) on Hopper: one latent row of R + Z numbers per token serves all heads.

    out[t, h] = sum_j softmax_j(cap(scale * q[t, h] . c[j])) c[j, :R]   over the latents j that t sees

The kernel is the decode kernel (paged_attention/hopper/decode.py) for one kv head whose values are
the first R columns of its keys, so each latent is read once. The rows of its products are the query
heads, times the query tokens, of a row. There are two forms for 16-bit latents:

* few rows (DeepSeek-V2-Lite's 16 heads): warp-level products, each of two warpgroups with tiles of
  its own;
* up to 64 rows: warpgroup products, two warpgroups sharing each tile (`consume`).

More than 64 heads take several blocks that read the same latents. Rows with more tokens than a
product has rows for are cut into slices (plan.py), so prompts use this kernel too. 8-bit latents
have one form, of 16 rows (`consume_bytes` in decode_body.py), and more heads take more blocks;
their column scales are folded into the queries and the result outside the kernel.

In the shared form, the mixed values of 64 rows are 64 x 512 numbers, twice what a warpgroup's
registers hold. So each of the two warpgroups holds half of the value columns, and needs all
weights. To compute no score twice, each forms the scores of half of a tile's keys; they exchange
the maximum of each row, and store their weights where both can read them: in their own slot of
keys, over the Z rotary columns, which are not values and are unused once the scores exist.

Floor: 2 (R + Z) bytes per latent over the bandwidth, and 2 (2 R + Z) operations per head and latent
seen: products of 64 rows take slightly less time than reading the latents once.

Letters: T tokens, S rows, S' slices, N pages in the pool, B page size, H query heads, R value
columns, Z rotary columns, D = R + Z, M = 64 rows of a product, C keys of a tile, half of them in
each of two slots of the ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import MASKED, Ragged
from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.compat import plgpu
from pallas_kernels.mosaic.interpret import Interpret, filled, wgmma, wgmmas
from pallas_kernels.mosaic.spec import CORES, SMEM, AttentionShape, allowed, check_attention, check_smem
from pallas_kernels.ops.mla.plan import sliced
from pallas_kernels.ops.paged_attention.hopper.decode import attend
from pallas_kernels.ops.paged_attention.hopper.decode_block import (
    MEETING,
    DecodeShape,
    Refs,
    each_item,
    last_key,
    mask,
    release,
)
from pallas_kernels.ops.paged_attention.hopper.softmax import LOG2E, unit_of
from pallas_kernels.ops.paged_attention.plan import DecodeWork, plan_decode

ROWS, FEW = 64, 16  # rows of a warpgroup product, and of a warp-level one, which spills with 32
TURNING = 64  # Z; a slot's weights of 64 keys are stored over these columns
CONSUMERS = 2
JOINT = 128  # keys of a tile that two warpgroups share


class MlaWork(NamedTuple):
    """The work items of `paged_mla`."""

    slices: Ragged  # the step, as S' rows
    decode: DecodeWork


@dataclass(frozen=True)
class Config:
    """How one shape is computed; run the work made by `plan` with the same config."""

    warps: bool = False  # warp-level products of 16 rows (16-bit latents: jax >= 0.11); else warpgroup products of 64
    queries: int = 1  # query tokens of a slice
    tile: int = JOINT  # latents of a tile
    stages: int = 2  # slots of the ring, each a tile, or half of a shared one
    workers: int = CORES  # blocks per 64 heads, or per 16 with 8-bit latents

    # What the decode kernel also asks; its split rows are combined by another kernel.
    consumers: ClassVar[int] = CONSUMERS
    p_in_smem: ClassVar[bool] = True
    merge: ClassVar[bool] = False

    def plan(self, ragged: Ragged, *, page: int, window: int | None = None, short: bool = False) -> MlaWork:
        """Plan a step; all layers share it. `short` promises that no row has more than `queries` tokens."""
        slices = ragged if short else sliced(ragged, self.queries)
        work = plan_decode(slices, page=page, queries=self.queries, tile=self.tile, workers=self.workers, window=window)
        return MlaWork(slices, work)

    def validate(self, spec: AttentionShape) -> None:
        """Raise ValueError, naming the value, if this config cannot compute the spec."""
        if spec.kv_heads != 1 or spec.heads % self.blocks(spec):
            raise ValueError(
                f"{spec.kv_heads=} must be 1, and {spec.heads=} must split evenly into the fewest blocks of at most "
                f"{most(spec)} heads"
            )
        if spec.values % 128 or not spec.values or spec.dim != spec.values + TURNING:
            raise ValueError(f"{spec.values=} must be a multiple of 128, and {spec.dim=} must be {TURNING} more")
        check_attention(spec)
        if spec.quantized and not self.warps:
            raise ValueError(f"{self.warps=} must be True for {spec.kv_dtype=}, which needs warp-level products")
        tiles = (64, 128) if spec.quantized else (32, 64, 128) if self.warps else (JOINT,)
        if self.tile not in tiles or (self.tile % spec.page and spec.page % self.tile):
            raise ValueError(f"{self.tile=} must be one of {tiles}, and a multiple or a divisor of {spec.page=}")
        if self.stages % CONSUMERS or self.stages < CONSUMERS:
            raise ValueError(f"{self.stages=} must be a multiple of {CONSUMERS}, so that each slot has one consumer")
        if self.queries < 1 or self.queries * self.group(spec) > self.rows(spec):
            raise ValueError(f"{self.queries=} times {self.group(spec)} heads must be 1 to {self.rows(spec)} rows")
        if self.warps and not (compat.HAS_MMA or spec.quantized):
            raise ValueError(f"{self.warps=} needs jax 0.11 or later; this is {jax.__version__}")
        check_smem(self, self.smem_bytes(spec), spec)

    def blocks(self, spec: AttentionShape) -> int:
        """Return the number of blocks that the query heads are split over."""
        return -(-spec.heads // most(spec))

    def group(self, spec: AttentionShape) -> int:
        """Return the query heads of a block."""
        return spec.heads // self.blocks(spec)

    def block(self, spec: AttentionShape) -> int:
        """Return the query tokens of a block."""
        return self.queries

    def rows(self, spec: AttentionShape) -> int:
        """Return M, the rows of a product."""
        return FEW if self.warps else ROWS

    def smem_bytes(self, spec: AttentionShape) -> int:
        """Return the shared memory of a block, including barriers and alignment."""
        rows, latent = self.rows(spec), spec.dim * 2
        if spec.quantized:
            meeting = CONSUMERS * (64 * (MEETING + 8) + 128) * 4
            return 2 * rows * latent + self.stages * self.tile * spec.dim + meeting + 2048
        if self.warps:
            return 2 * rows * latent + self.stages * self.tile * latent + CONSUMERS * rows * self.tile * 2 + 2048
        return rows * latent + self.stages * (self.tile // CONSUMERS) * latent + CONSUMERS * rows * 4 + 2048


def most(spec: AttentionShape) -> int:
    """Return the maximum number of query heads of a block."""
    return FEW if spec.quantized else ROWS


def heuristic(spec: AttentionShape, *, warps: bool | None = None) -> Config:
    """Return a config expected to be good for the spec; `warps` None chooses by the rows of the product.

    `spec.queries` is the maximum tokens of a row; rows beyond a product's capacity are cut into
    slices.
    """
    blocks = -(-spec.heads // most(spec))
    group = spec.heads // blocks
    queries = max(1, min(spec.queries, most(spec) // max(1, group)))
    if warps is None:
        warps = spec.quantized or (compat.HAS_MMA and queries * group <= FEW)
    tile = 32 if warps and not spec.quantized else JOINT
    if spec.quantized and spec.page < 32:  # page numbers of larger tiles exceed the producer's registers
        tile = 64
    config = Config(warps=warps, queries=queries, tile=tile, workers=max(1, spec.cores // blocks))
    for stages in (8, 4):
        deep = replace(config, stages=stages)
        if deep.smem_bytes(spec) <= SMEM:
            return deep
    return config


def candidates(spec: AttentionShape) -> Iterator[Config]:
    """Yield configs worth timing for the spec, the heuristic one first; the compile gate drops those that spill."""
    best = heuristic(spec)
    yield best
    if spec.quantized:
        yield from allowed([replace(best, tile=64, stages=stages) for stages in (2, 4)], spec)
        return
    some = [replace(heuristic(spec, warps=False), stages=stages) for stages in (2, 4)]
    if compat.HAS_MMA:
        some += [replace(best, warps=True, tile=tile, stages=stages) for tile in (32, 64) for stages in (2, 4)]
    yield from (config for config in allowed(some, spec) if config != best)


def paged_mla(
    q: jax.Array,  # [T, H, D]
    pool: jax.Array,  # [N, B, 1, D]
    work: MlaWork,
    *,
    values: int,  # R
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    config: Config,
    interpret: Interpret = None,
) -> tuple[jax.Array, jax.Array]:
    """Return mixed latents [T, H, R] in the dtype of q, and lse [T, H]; zeros and MASKED for padding tokens.

    `work` is `config.plan(ragged, page=B, window=window)`. The pool must hold finite numbers
    everywhere, even where nothing was written, because masked latents are multiplied by zero.
    """
    rows, (_, page, copies, dim) = work.slices.lengths.shape[0], pool.shape
    spec = AttentionShape(
        rows, q.shape[1], copies, dim, page, config.queries, q.dtype, pool.dtype, cores=config.workers, values=values
    )
    config.validate(spec)
    if work.decode.workers != config.workers or work.decode.row.shape[0] != config.workers + rows:
        raise ValueError(f"the work has {work.decode.workers} workers but {config.workers=}; plan with this config")
    shape = DecodeShape(spec, config, scale, window, softcap, interpret)
    return attend(
        shape, q, (pool,), work.slices, work.decode, None, kv_heads=config.blocks(spec), blocks=1, joint=consume
    )


State = tuple[jax.Array, jax.Array, jax.Array]  # mixed [M, R / 2], row maximum [M] in log2 units, row sum [M]


def consume(shape: DecodeShape, refs: Refs, me: Any) -> None:
    """Attend to every item of a block, sharing each tile with the other consumer."""
    s, block, head = refs.s, lax.axis_index("block"), lax.axis_index("head")

    def attend_item(item: Any, number: Any, row: Any, tiles: Any, done: Any) -> None:
        plgpu.barrier_wait(s["q_full"].at[0])
        position = last_key(shape, refs, row)

        def step(i: Any, state: State) -> State:
            key = (refs.first[item] + i) * shape.config.tile + me * shape.slot
            return _tile(shape, s, me, done + i, key, position, state)

        acc, peak, total = lax.fori_loop(0, tiles, step, _begin(shape))
        release(shape, s["q_free"].at[0])
        total = total + _exchange(shape, s, me, total)
        _meet(s, 1)
        safe = jnp.maximum(total, 1e-30)
        mixed = acc * lax.broadcast_in_dim(1.0 / safe, acc.shape, (0,))
        refs.mixed[item, head, block, :, pl.ds(me * shape.width, shape.width)] = mixed

        @pl.when(me == 0)
        def _() -> None:
            refs.weight[item, head, block] = jnp.where(total > 0, peak + jnp.log(safe) * LOG2E, MASKED)

    each_item(shape, refs, attend_item)


def _begin(shape: DecodeShape) -> State:
    layout, full = shape.layout("ACC"), partial(filled, interpret=shape.interpret)
    row = layout.reduce(1)
    return full(0.0, (shape.rows, shape.width), layout), full(MASKED, (shape.rows,), row), full(0.0, (shape.rows,), row)


def _tile(shape: DecodeShape, s: dict[str, Any], me: Any, tile: Any, key: Any, position: Any, state: State) -> State:
    """Attend to the block's `tile`th tile; this warpgroup's keys start at `key`."""
    acc, peak, total = state
    slots, mine = [shape.place(tile, part) for part in range(shape.slots)], shape.place(tile, me)
    for slot in slots:  # wait for both slots before forming the scores: both warpgroups read both
        plgpu.barrier_wait(s["k_full"].at[slot])
    unit = unit_of(shape.scale, shape.softcap)
    score = wgmma(s["q"].at[0], s["k"].at[mine], transposed=True, interpret=shape.interpret)
    score = mask(shape, score, key, position, shape.scale)
    top = jnp.maximum(peak, jnp.max(score, axis=1) * unit)
    top = jnp.maximum(top, _exchange(shape, s, me, top))
    weight = jnp.exp2(score * unit - lax.broadcast_in_dim(top, score.shape, (0,)))
    fade = jnp.exp2(peak - top)
    turning = pl.ds(shape.values, shape.slot)
    s["k"][mine, :, turning] = weight.astype(shape.spec.compute_dtype)
    plgpu.commit_smem()
    total = total * fade + jnp.sum(weight, axis=1)
    acc = acc * lax.broadcast_in_dim(fade, acc.shape, (0,))
    _meet(s, 1)
    columns = pl.ds(me * shape.width, shape.width)
    acc = wgmmas(acc, [(s["k"].at[n, :, turning], s["k"].at[n, :, columns]) for n in slots], shape.interpret)
    for slot in slots:
        release(shape, s["k_free"].at[slot])
    return acc, top, total


def _exchange(shape: DecodeShape, s: dict[str, Any], me: Any, x: jax.Array) -> jax.Array:
    """Exchange x [M] between the two warpgroups; both must `_meet` before the next exchange."""
    s["traded"][me] = x
    _meet(s, 0)
    return compat.load(s["traded"].at[1 - me], shape.layout("ACC").reduce(1), optimized=False)


def _meet(s: dict[str, Any], which: int) -> None:
    plgpu.barrier_arrive(s["met"].at[which])
    plgpu.barrier_wait(s["met"].at[which])
