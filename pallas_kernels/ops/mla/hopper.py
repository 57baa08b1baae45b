"""Attention to latents on Hopper (MLA): keys and values of all heads are one row of R + Z numbers per token.

    out[t, h] = sum_j softmax_j(cap(scale * q[t, h] . c[j])) c[j, :R]   over the latents j that t sees

The kernel is that of decode attention (paged_attention/hopper/decode.py), for one kv head whose values are the first
columns of its keys, read once: the rows of its products are the query heads, and the query tokens, of a row. Few rows,
as of DeepSeek-V2-Lite's 16 heads, are products of warps, each of two warpgroups with tiles of its own; many are
products of two warpgroups that share a tile (`consume`). More than 64 heads are several blocks, that read the same
latents. A row of more tokens than the products have rows for is cut (plan.py), so that prompts are attended to by the
same kernel.

Latents of 8 bits have one form, for 16 rows (`consume_bytes` of decode_body.py): more heads are more blocks. They are
plain numbers here: what columns were divided by is in the queries, and multiplies the result, outside.

Floor: 2 (R + Z) bytes of each latent over the bandwidth, and 2 (2 R + Z) operations for each head and latent that it
sees: 64 rows of products are a little below what the device computes in the time of reading them once.

Letters: T tokens, S rows, S' slices of them, N pages in the pool, B page size, H query heads, R columns of the values,
Z columns that turn, D = R + Z.

The mixed values of 64 rows are 64 x 512 numbers, twice the registers that a warpgroup has for them. So each of two has
a half of the columns, and needs all the weights. They form the scores of one half of a tile's keys each, which is no
work twice, tell each other the highest score of each row, and put their weights where both can read them: into their
own slot of keys, over the columns that turn, which are no values, and of no use once the scores are formed.

M = 64 rows, R columns of the values, C = tokens of keys in a tile, one half of them in each of two slots of the ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import MASKED, Ragged
from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.compat import plgpu
from pallas_kernels.mosaic.interpret import Interpret, cast, wgmma, wgmmas
from pallas_kernels.mosaic.spec import CORES, SMEM, Spec, allowed
from pallas_kernels.ops.mla.plan import sliced
from pallas_kernels.ops.paged_attention.hopper.decode import attend
from pallas_kernels.ops.paged_attention.hopper.decode_block import MEETING, Refs, Shape, each_item, mask, release
from pallas_kernels.ops.paged_attention.hopper.softmax import LEAST, LOG2E
from pallas_kernels.ops.paged_attention.plan import DecodeWork, plan_decode

ROWS, FEW = 64, 16  # of a product of warpgroups, and of warps: with 32 those spill
TURNING = 64  # Z: where the weights of 64 keys find room
CONSUMERS = 2
JOINT = 128  # tokens of a tile that two warpgroups share


class MlaWork(NamedTuple):
    """What `paged_mla` runs through."""

    slices: Ragged  # the step, in S' rows
    decode: DecodeWork


@dataclass(frozen=True)
class Config:
    """How one shape is computed. `plan` makes the work that `paged_mla` of the same config wants."""

    warps: bool = False  # products of warps, of 16 rows (jax >= 0.11); else of warpgroups, of 64
    queries: int = 1  # query tokens of a slice
    tile: int = JOINT  # tokens of latents at a time
    stages: int = 2  # slots of the ring: of a tile, or of the half of one that is shared
    workers: int = CORES  # blocks per 64 heads, or 16 where latents are of 8 bits

    def plan(self, ragged: Ragged, *, page: int, window: int | None = None, short: bool = False) -> MlaWork:
        """Once per step; all layers share it. `short` promises that no row has more than `queries` tokens."""
        slices = ragged if short else sliced(ragged, self.queries)
        work = plan_decode(slices, page=page, queries=self.queries, tile=self.tile, workers=self.workers, window=window)
        return MlaWork(slices, work)

    def validate(self, spec: Spec) -> None:
        """Raises ValueError, naming the value, where this config cannot compute the spec."""
        if spec.kv_heads != 1 or spec.heads % self.blocks(spec):
            raise ValueError(
                f"{spec.kv_heads=} must be 1, and {spec.heads=} up to {most(spec)} or a multiple of as many"
            )
        if spec.values % 128 or not spec.values or spec.dim != spec.values + TURNING:
            raise ValueError(f"{spec.values=} must be a multiple of 128, and {spec.dim=} be {TURNING} more")
        if spec.page % 8 or not 8 <= spec.page <= 256:
            raise ValueError(f"{spec.page=} must be a multiple of 8 up to 256")
        if spec.quantised and not self.warps:
            raise ValueError(f"{self.warps=} must be True for {spec.kv_dtype=}: those go by products of warps")
        tiles = (64, 128) if spec.quantised else (32, 64, 128) if self.warps else (JOINT,)
        if self.tile not in tiles or (self.tile % spec.page and spec.page % self.tile):
            raise ValueError(f"{self.tile=} must be of {tiles}, and a multiple or a divisor of {spec.page=}")
        if self.stages % CONSUMERS or self.stages < CONSUMERS:
            raise ValueError(f"{self.stages=} must be a multiple of {CONSUMERS}: a slot has one consumer")
        if self.queries < 1 or self.queries * self.group(spec) > self.rows(spec):
            raise ValueError(f"{self.queries=} of {self.group(spec)} heads must be 1 to {self.rows(spec)} rows")
        if self.warps and not (compat.HAS_MMA or spec.quantised):
            raise ValueError(f"{self.warps=} needs jax 0.11 or later; this is {jax.__version__}")
        if jnp.dtype(spec.dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
            raise ValueError(f"{spec.dtype=} must be bfloat16 or float16")
        if not spec.quantised and jnp.dtype(spec.kv_dtype) != jnp.dtype(spec.dtype):
            raise ValueError(f"{spec.kv_dtype=} must be float8_e4m3fn, int8 or {spec.dtype=}")
        if (size := self.smem_bytes(spec)) > SMEM:
            raise ValueError(f"{self} needs {size} bytes of shared memory for {spec}; a block has {SMEM}")

    def blocks(self, spec: Spec) -> int:
        """Groups of query heads, each a block's."""
        return -(-spec.heads // most(spec))

    def group(self, spec: Spec) -> int:
        """Query heads of a block."""
        return spec.heads // self.blocks(spec)

    def rows(self, spec: Spec) -> int:
        """M"""
        return FEW if self.warps else ROWS

    def smem_bytes(self, spec: Spec) -> int:
        """Shared memory of a block, barriers and alignment included."""
        rows, latent = self.rows(spec), spec.dim * 2
        if spec.quantised:
            meeting = CONSUMERS * (64 * (MEETING + 8) + 128) * 4
            return 2 * rows * latent + self.stages * self.tile * spec.dim + meeting + 2048
        if self.warps:
            return 2 * rows * latent + self.stages * self.tile * latent + CONSUMERS * rows * self.tile * 2 + 2048
        return rows * latent + self.stages * (self.tile // CONSUMERS) * latent + CONSUMERS * rows * 4 + 2048


def most(spec: Spec) -> int:
    """Query heads of a block at most."""
    return FEW if spec.quantised else ROWS


def heuristic(spec: Spec, *, warps: bool | None = None) -> Config:
    """A config for the spec that is expected to be good; `warps` None chooses by the rows of the product.

    `spec.queries` is the most tokens of a row; those that a product has no rows for are cut.
    """
    blocks = -(-spec.heads // most(spec))
    group = spec.heads // blocks
    queries = max(1, min(spec.queries, most(spec) // max(1, group)))
    if warps is None:
        warps = spec.quantised or (compat.HAS_MMA and queries * group <= FEW)
    tile = 32 if warps and not spec.quantised else JOINT
    if spec.quantised and spec.page < 32:  # the producer lacks registers for the numbers of more pages
        tile = 64
    config = Config(warps=warps, queries=queries, tile=tile, workers=max(1, spec.cores // blocks))
    for stages in (8, 4):
        deep = replace(config, stages=stages)
        if deep.smem_bytes(spec) <= SMEM:
            return deep
    return config


def candidates(spec: Spec) -> Iterator[Config]:
    """Configs worth timing for the spec, the heuristic first; the compile gate drops those that spill."""
    best = heuristic(spec)
    yield best
    if spec.quantised:
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
    """Mixed latents [T, H, R] in the dtype of q and lse [T, H]; zeros and MASKED for padding tokens.

    `work` is `config.plan(ragged, page=B, window=window)`. The pool must hold finite numbers everywhere, also where
    nothing was written: what a masked latent holds is multiplied by zero.
    """
    rows, (_, page, copies, dim) = work.slices.lengths.shape[0], pool.shape
    spec = Spec(
        rows, q.shape[1], copies, dim, page, config.queries, q.dtype, pool.dtype, cores=config.workers, values=values
    )
    config.validate(spec)
    if work.decode.workers != config.workers or work.decode.row.shape[0] != config.workers + rows:
        raise ValueError(f"the work is of {work.decode.workers} workers and {config.workers=}; plan with this config")
    used = config.queries * config.group(spec)
    shape = Shape(
        rows=config.rows(spec),
        packed=-(-used // 8) * 8,
        group=config.group(spec),
        block=config.queries,
        dim=dim,
        page=page,
        tile=config.tile,
        stages=config.stages,
        consumers=CONSUMERS,
        dtype=jnp.dtype(spec.compute_dtype),
        kv_dtype=jnp.dtype(pool.dtype),
        warps=config.warps,
        p_in_smem=True,
        scale=scale,
        window=window,
        softcap=softcap,
        scaled=False,
        interpret=interpret,
        latent=values,
    )
    return attend(
        shape, q, (pool,), work.slices, work.decode, None, kv_heads=config.blocks(spec), blocks=1, joint=consume
    )


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
