"""Decode attention over pages on Hopper, for rows of 1 to 16 query tokens; bound by reading K and V.

    out[t, h] = sum_j softmax_j(cap(scale * q[t, h] . k[j, h // G])) v[j, h // G]   over the keys j that t sees

The G query heads of a kv head, times the row's query tokens, are packed into the M rows of one
product, so every key is read once. The plan splits rows over the keys (plan.py). A row of one item
is stored as it is computed; the items of others are float32 partial results, which the last of their
workers merges (decode_merge.py) or a second kernel combines (combine.py). Queries and results keep
the layers' layout. Floor: bytes of K and V over the bandwidth; arithmetic stays below it up to M =
64.

Letters: T tokens, S rows, P pages per row, N pages in the pool, B page size, H query heads, K kv
heads, G = H / K, D head dim, Q maximum query tokens of a row, M rows of the product, the first U of
them in use, R columns of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.layout import MASKED, Ragged, Scales
from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.fragments import ROWS, arranged, in_order
from pallas_kernels.mosaic.interpret import Interpret
from pallas_kernels.mosaic.spec import CORES, SMEM, AttentionShape, allowed, check_attention, check_smem
from pallas_kernels.ops.paged_attention.hopper.combine import LANES, Combine, Partials, fill, make
from pallas_kernels.ops.paged_attention.hopper.decode_block import MEETING, WIDE, DecodeShape, Results, Split, spills
from pallas_kernels.ops.paged_attention.hopper.decode_body import Consume, body
from pallas_kernels.ops.paged_attention.plan import DecodeWork, plan_decode

WGMMA_ROWS = 64


@dataclass(frozen=True)
class Config:
    """How one shape is computed; run the work made by `plan` with the same config."""

    # Warp-level products of 16, 32 or 64 rows (jax >= 0.11; with 8-bit pools any jax, but only 16 rows), or warpgroup
    # products of 64 rows.
    warps: bool = False
    queries: int = 1  # Q
    tile: int = 64  # tokens of keys per tile
    stages: int = 4  # slots of the ring
    consumers: int = 2  # warpgroups that compute
    workers: int = CORES // 8  # blocks per kv head and block of query tokens
    p_in_smem: bool = True  # pass weights to the second product through shared memory
    merge: bool = True  # the last worker of a split row merges it, up to M = 16, instead of a second kernel

    def plan(self, ragged: Ragged, *, page: int, window: int | None = None) -> DecodeWork:
        """Plan a step; all layers of one window share it."""
        return plan_decode(ragged, page=page, queries=self.queries, tile=self.tile, workers=self.workers, window=window)

    def validate(self, spec: AttentionShape) -> None:
        """Raise ValueError, naming the value, if this config cannot compute the spec."""
        if spec.heads % spec.kv_heads or spec.group > WGMMA_ROWS:
            raise ValueError(f"{spec.heads=} must be a multiple of {spec.kv_heads=}, at most {WGMMA_ROWS} times it")
        if spec.dim not in (64, 128, 256):
            raise ValueError(f"{spec.dim=} must be 64, 128 or 256")
        check_attention(spec)
        if self.tile % 64 or (self.tile % spec.page and spec.page % self.tile):
            raise ValueError(f"{self.tile=} must be a multiple of 64, and a multiple or a divisor of {spec.page=}")
        if self.stages % self.consumers or self.stages < self.consumers:
            raise ValueError(
                f"{self.stages=} must be a multiple of {self.consumers=}, so that each slot has one consumer"
            )
        if self.consumers not in (1, 2):
            raise ValueError(f"{self.consumers=} must be 1 or 2")
        if spec.heads * spec.dim < LANES:
            raise ValueError(f"{spec.heads=} of {spec.dim=} must be at least {LANES} numbers")
        if not 1 <= self.queries <= 16:
            raise ValueError(f"{self.queries=} must be between 1 and 16")
        if self.warps and not (compat.HAS_MMA or spec.quantized):
            raise ValueError(f"{self.warps=} needs jax 0.11 or later; this is {jax.__version__}")
        if self.warps and spec.quantized and self.block(spec) * spec.group > ROWS:
            raise ValueError(
                f"{self.warps=} with {spec.kv_dtype=} needs at most {ROWS} rows, not {self.block(spec)} * {spec.group}"
            )
        check_smem(self, self.smem_bytes(spec), spec)

    def group(self, spec: AttentionShape) -> int:
        """Return the query heads of a block."""
        return spec.group

    def block(self, spec: AttentionShape) -> int:
        """Return the query tokens that one block takes."""
        return min(self.queries, WGMMA_ROWS // spec.group)

    def blocks(self, spec: AttentionShape) -> int:
        return -(-self.queries // self.block(spec))

    def rows(self, spec: AttentionShape) -> int:
        """Return M, the rows of a product."""
        used = self.block(spec) * spec.group
        return next(m for m in (16, 32, 64) if used <= m) if self.warps else WGMMA_ROWS

    def smem_bytes(self, spec: AttentionShape) -> int:
        """Return the shared memory of a block, including barriers and alignment."""
        wide, rows = 2, self.rows(spec)  # bytes of an operand's element
        ring = 2 * self.stages * self.tile * spec.dim * (1 if spec.quantized else wide)
        added = rows * (spec.dim if self.consumers > 1 else WIDE) * 4
        rest = rows * spec.dim * wide + added + 4096
        if spec.quantized and self.warps:
            # Packed queries or tokens: which of them also depends on the soft cap, which is not in the spec.
            rest = max(rest, 2 * rows * spec.dim * wide + 4096)
            return ring + rest + self.consumers * (64 * (MEETING + 8) + 128 + 128) * 4
        if not self.warps:
            exchange = self.consumers * 2 * rows * 4  # maxima and sums
            rest = 2 * rows * spec.dim * wide + (4096 if spills(spec.dim) else added + exchange + 3072)
        weights = self.consumers * rows * self.tile * wide if self.warps or self.p_in_smem else 0
        widened = self.consumers * self.tile * spec.dim * wide if spec.quantized else 0
        return ring + rest + weights + widened


def heuristic(spec: AttentionShape, *, warps: bool | None = None) -> Config:
    """Return a config expected to be good for the spec; `warps` None chooses by the rows of the product."""
    packed = spec.queries * spec.group
    if warps is None:
        most = ROWS if spec.quantized or spec.dim > WIDE else 2 * ROWS  # more spill registers
        warps = packed <= most and (spec.quantized or compat.HAS_MMA)
    # For D = 256 the mixed values take 128 registers per thread, too many with three warpgroups per block.
    consumers = 1 if spec.dim > 128 else 2
    config = Config(warps=warps, queries=spec.queries, consumers=consumers)
    blocks = config.blocks(spec)
    config = replace(config, workers=max(1, spec.cores // (spec.kv_heads * blocks)))
    for stages in (8, 6, 4, 2):
        deep = replace(config, stages=stages)
        if deep.smem_bytes(spec) <= SMEM:
            return deep
    return replace(config, stages=1, consumers=1)


def candidates(spec: AttentionShape) -> Iterator[Config]:
    """Yield configs worth timing for the spec, the heuristic one first; the compile gate drops those that spill."""
    best = heuristic(spec)
    yield best
    if best.warps and best.rows(spec) <= ROWS:
        yield replace(best, merge=False)
    bodies = (True, False) if compat.HAS_MMA or spec.quantized else (False,)
    for share in (1, 2):  # blocks per core at a time
        some = (
            replace(best, warps=warps, consumers=consumers, tile=tile, stages=stages, workers=best.workers * share)
            for warps, consumers, tile, stages in product(bodies, (1, 2), (64, 128), (2, 3, 4, 6, 8))
        )
        for config in allowed(some, spec):
            if config != best and share * config.smem_bytes(spec) <= SMEM:
                yield config


def paged_decode(
    q: jax.Array,  # [T, H, D]
    k_pool: jax.Array,  # [N, B, K, D]
    v_pool: jax.Array,  # [N, B, K, D]
    ragged: Ragged,
    work: DecodeWork,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    scales: Scales | None = None,
    config: Config,
    interpret: Interpret = None,
    clean: bool = True,
    causal: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Return mixed values [T, H, D] in the dtype of q and lse [T, H]; zeros and MASKED for tokens not in `work`.

    `work` is `config.plan(ragged, page=B, window=window)`. Pools must hold finite numbers
    everywhere, even where nothing was written, because masked keys are multiplied by zero.
    `clean=False` leaves arbitrary values for tokens of rows not in `work`, which saves a pass if
    there are none or the caller overwrites them; padding is zeros. `causal=False` shows each query all
    keys of its row, and allows no window.
    """
    rows, (_, page, kv_heads, dim) = ragged.lengths.shape[0], k_pool.shape
    spec = AttentionShape(rows, q.shape[1], kv_heads, dim, page, config.queries, q.dtype, k_pool.dtype)
    config.validate(spec)
    spec.check_scales(scales)
    if work.workers != config.workers or work.row.shape[0] != config.workers + rows:
        raise ValueError(f"the work has {work.workers} workers but {config.workers=}; plan with this config")
    if window is not None and not causal:
        raise ValueError(f"{window=} needs causal=True: positions of queries are unknown")
    shape = DecodeShape(spec, config, scale, window, softcap, interpret, causal)
    out, lse = attend(shape, q, (k_pool, v_pool), ragged, work, scales, kv_heads=kv_heads, blocks=config.blocks(spec))
    if clean:
        row = jnp.minimum(ragged.rows, rows - 1)
        out = jnp.where(((ragged.rows < rows) & (work.splits[row] > 0))[:, None, None], out, 0)
    return out, lse


def attend(
    shape: DecodeShape,
    q: jax.Array,  # [T, H, D]
    pools: tuple[jax.Array, ...],  # keys and values, or latents
    ragged: Ragged,
    work: DecodeWork,
    scales: Scales | None,
    *,
    kv_heads: int,  # K, or for a latent the groups of its query heads
    blocks: int,
    joint: Consume | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Run decode and combine: mixed values [T, H, R] in the dtype of q and lse [T, H].

    Padding gives zeros and MASKED, other tokens of rows not in `work` arbitrary values and MASKED.
    `joint`: see `body`.
    """
    arrays_of = _packed if shape.results is Results.PACKED else _by_token
    arrays = arrays_of(shape, q, ragged, work, kv_heads, blocks)
    run = compat.kernel(
        body(shape, joint),
        out=arrays.shapes,
        scratch=shape.scratch(),
        # Heads are the last, fastest axis, so blocks that read adjacent bytes of the same pages run side by side.
        grid=(("worker", work.workers), ("block", blocks), ("head", kv_heads)),
        threads=("role", shape.config.consumers + 1),
        interpret=shape.interpret,
    )
    planned = work.table, work.row, work.first, work.tiles, work.cuts, work.part
    step = ragged.starts, ragged.lengths, ragged.contexts
    results = run(arrays.q, *pools, *planned, *step, *arrays.merging, *(scales or ()))
    out, lse = arrays.combine(results)
    out = out.reshape(len(q), q.shape[1], shape.values)
    if shape.split is Split.WARPS:
        out = in_order(out, shape.width)
    return out, _unpack(lse, ragged, work, shape)


class _Arrays(NamedTuple):
    """The queries and results of a decode kernel in its layout."""

    q: jax.Array
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    combine: Callable[[tuple[jax.Array, ...]], tuple[jax.Array, jax.Array]]  # to out [T, H * R] and lse
    merging: tuple[jax.Array, ...] = ()  # what the kernel also reads to merge split rows


def _by_token(
    shape: DecodeShape, q: jax.Array, ragged: Ragged, work: DecodeWork, kv_heads: int, blocks: int
) -> _Arrays:
    """Return the arrays of `Results.BY_TOKEN` and `Results.MERGED`."""
    (tokens, heads, dim), parts, rows = q.shape, work.most_parts, len(ragged.starts)
    by_group, sums = (kv_heads, shape.group, dim), (kv_heads, blocks, shape.rows)
    merges = shape.results is Results.MERGED
    mixed = (kv_heads, blocks, dim // WIDE, shape.kept, WIDE) if merges else (blocks * shape.block, *by_group)
    shapes = (
        jax.ShapeDtypeStruct((parts, *mixed), jnp.float32),
        jax.ShapeDtypeStruct((parts * shape.config.consumers if merges else parts, *sums), jnp.float32),
        jax.ShapeDtypeStruct((tokens, *by_group), q.dtype),
        jax.ShapeDtypeStruct((rows, *sums), jnp.float32),
    )
    if merges:
        # The kernel counts down in this array, and restores it, so XLA makes it once for all layers. Zeros would be a
        # constant that the layers of another plan may share, and thus kernels that run at the same time.
        left = jnp.broadcast_to(work.splits[:, None, None, None] - 1, (rows, kv_heads, blocks, shape.config.consumers))
        merging = work.worker, work.splits, work.tokens, left
        return _Arrays(q.reshape(tokens, *by_group), shapes, lambda results: (results[2], results[3]), merging)

    def combine(results: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        mixed, weight, out, lse = results
        counts = jnp.where(work.splits > 1, work.splits, 0)
        partials = Partials(mixed, weight, work.worker, counts, ragged.starts, ragged.lengths, work.tokens)
        each = Combine(heads, shape.group, shape.block, dim, by_token=True, interpret=shape.interpret)
        return fill(each, partials, out.reshape(tokens, heads * dim), lse)

    return _Arrays(q.reshape(tokens, *by_group), shapes, combine)


def _packed(shape: DecodeShape, q: jax.Array, ragged: Ragged, work: DecodeWork, kv_heads: int, blocks: int) -> _Arrays:
    parts = work.row.shape[0] * shape.partials
    shapes = (
        jax.ShapeDtypeStruct((parts, kv_heads, blocks, shape.rows, shape.values), jnp.float32),
        jax.ShapeDtypeStruct((parts, kv_heads, blocks, shape.rows), jnp.float32),
    )

    def combine(results: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        begins, counts = work.begins * shape.partials, work.splits * shape.partials
        partials = Partials(results[0], results[1], begins, counts, ragged.starts, ragged.lengths, work.tokens)
        each = Combine(q.shape[1], shape.group, shape.block, shape.values, by_token=False, interpret=shape.interpret)
        return make(each, partials, len(q), q.dtype)

    return _Arrays(_pack(q, ragged, shape, kv_heads, blocks), shapes, combine)


def _pack(q: jax.Array, ragged: Ragged, shape: DecodeShape, kv_heads: int, blocks: int) -> jax.Array:
    """Gather q [T, H, D] by row for the products: [S, K, blocks, packed, D], query tokens major, G minor."""
    token = ragged.starts[:, None] + jnp.arange(blocks * shape.block)[None]
    taken = jnp.take(q, token, axis=0, mode="clip").astype(shape.spec.compute_dtype)  # [S, blocks * block, H, D]
    split = taken.reshape(-1, blocks, shape.block, kv_heads, shape.group, shape.spec.dim)
    split = split.transpose(0, 3, 1, 2, 4, 5).reshape(-1, kv_heads, blocks, shape.used, shape.spec.dim)
    padded = jnp.pad(split, ((0, 0), (0, 0), (0, 0), (0, shape.packed - shape.used), (0, 0)))
    return arranged(padded) if shape.latent and shape.split is Split.WARPS else padded


def _unpack(lse: jax.Array, ragged: Ragged, work: DecodeWork, shape: DecodeShape) -> jax.Array:
    """Gather lse [S, K, blocks, M] to [T, H]; MASKED for tokens not in `work`."""
    rows, kv_heads = lse.shape[:2]
    row = jnp.minimum(ragged.rows, rows - 1)  # [T]
    mine = (ragged.rows < rows) & (work.splits[row] > 0)
    token = jnp.where(mine, jnp.arange(len(row)) - ragged.starts[row], 0)
    used = lse[..., : shape.used].reshape(rows, kv_heads, -1, shape.block, shape.group)
    taken = jnp.moveaxis(used, 1, 3)[row, token // shape.block, token % shape.block]
    return jnp.where(mine[:, None], taken.reshape(len(row), -1), MASKED)
