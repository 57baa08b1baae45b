"""Paged attention for one TPU core, shared by decode and prefill.

An item is up to Q consecutive tokens of one row (plan.py). The grid runs over items; within an
item, a loop runs over tiles of C keys. A tile's pages are copied, one copy each, from the pool in
HBM into one of two slots in VMEM, while the previous tile is computed; an item's last tile overlaps
the copies of the next item's first. Softmax is online, in float32. Tiles after an item's last token
or before its window are not read; only tiles at these edges are masked.

A page is viewed as [B * K, D], which for D = 128 matches the pool's layout in memory and is free.
Its rows alternate between kv heads, which can be handled in two ways:

* mixed: all queries [Q * H, D] meet all rows [C * K, D], and scores of other kv heads are masked.
  That is K times the arithmetic but no more loads of the matrix unit, which dominate while Q * H is
  small.
* apart: the tile is converted to float32 once, and each kv head's keys [C, D] are read back with a
  stride.

A *stream* is what one product covers: everything if mixed, one kv head if apart.

Letters: T tokens, S rows, P pages per row, N pages in the pool, B page size, H query heads, K kv
heads, G = H / K, D head dim, I items, Q tokens of an item, C keys of a tile, R rows of a stream's
products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as _pltpu

from pallas_kernels.layout import MASKED, Ragged, Scales
from pallas_kernels.ops.paged_attention.tpu.config import Config, TpuShape, free_view
from pallas_kernels.ops.paged_attention.tpu.plan import WorkItems

pltpu: Any = _pltpu  # as Any: its types change between versions
Ref = Any


@dataclass(frozen=True)
class KernelStatics:
    """The static parameters of the kernel."""

    config: Config
    shape: TpuShape
    scale: float
    window: int | None
    softcap: float | None
    scaled: bool  # scores are multiplied by an array instead of `scale`
    dtype: Any  # of the products

    @property
    def pages(self) -> int:
        """The pages of a tile."""
        return self.config.pages(self.shape)

    @property
    def keys(self) -> int:
        """C, the keys of a tile."""
        return self.pages * self.shape.page

    @property
    def streams(self) -> int:
        return self.config.streams(self.shape)

    @property
    def heads(self) -> int:
        """The number of kv heads that alternate in the rows of one product."""
        return self.shape.kv_heads if self.config.mixed else 1


@dataclass(frozen=True)
class Plan:
    """Scalars of the plan; see plan.py."""

    items: Ref
    rows: Ref
    firsts: Ref
    ends: Ref

    def span(self, job: KernelStatics, item: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the first key tile of an item, and one past its last."""
        stop = (self.ends[item] + job.keys - 1) // job.keys
        if job.window is None:
            return jnp.int32(0), stop
        return jnp.maximum(self.firsts[item] - job.window + 1, 0) // job.keys, stop


@dataclass(frozen=True)
class Pages:
    """The pools in HBM, [N, B * K, D], and their two slots in VMEM, [2, pages, B * K, D].

    Scalar memory is too small for the block tables of a step, so it holds two rows of them, each
    [1, 1, P]: the item's and the next item's.
    """

    job: KernelStatics
    plan: Plan
    tables: Sequence[Ref]
    pools: Sequence[Ref]  # k, v
    slots: Sequence[Ref]
    arrived: Ref  # semaphores [2 slots, 2 pools]

    def start(self, ahead: int, item: jax.Array, tile: jax.Array, slot: jax.Array) -> None:
        """Start fetching the pages of a tile of `item`: the current item, or with `ahead` = 1 the next."""

        def start_page(page: jax.Array, _: None) -> None:
            for copy in self._copies(self.tables[ahead][0, 0, tile * self.job.pages + page], page, slot):
                copy.start()

        lax.fori_loop(0, self._held(item, tile), start_page, None)

    def wait(self, item: jax.Array, tile: jax.Array, slot: jax.Array) -> None:
        def wait_page(page: jax.Array, _: None) -> None:
            # Any page will do, because only the number of bytes matters to the wait.
            for copy in self._copies(jnp.int32(0), page, slot):
                copy.wait()

        lax.fori_loop(0, self._held(item, tile), wait_page, None)

    def _held(self, item: jax.Array, tile: jax.Array) -> jax.Array:
        left = self.plan.ends[item] - tile * self.job.keys
        return jnp.minimum((left + self.job.shape.page - 1) // self.job.shape.page, self.job.pages)

    def _copies(self, page: jax.Array, at: jax.Array, slot: jax.Array) -> list[Any]:
        return [
            pltpu.make_async_copy(pool.at[page], slots.at[slot, at], self.arrived.at[slot, which])
            for which, (pool, slots) in enumerate(zip(self.pools, self.slots, strict=True))
        ]


def body(job: KernelStatics, *refs: Ref) -> None:
    """Compute one item; `refs` are scalars, inputs, outputs and scratch, in the order of `_run`."""
    plan, rest = Plan(*refs[:4]), list(refs[4:])
    q, here, there, tokens, kv_heads = rest[:5]
    del rest[:5]
    factors = rest.pop(0) if job.scaled else None
    k_pool, v_pool, out, lse, k_slots, v_slots = rest[:6]
    wide = rest[6:-5]
    peak, total, mixed, arrived, turn = rest[-5:]
    pages = Pages(job, plan, (here, there), (k_pool, v_pool), (k_slots, v_slots), arrived)
    state, rows = State(peak, total, mixed), RowRefs(tokens, kv_heads, factors)
    item = pl.program_id(0)

    def step(tile: jax.Array, slot: jax.Array) -> jax.Array:
        _fetch_next(pages, item, tile, 1 - slot)
        pages.wait(item, tile, slot)
        _attend(pages, state, q, rows, wide, item, tile, slot)
        return 1 - slot

    @pl.when(item < plan.items[0])
    def run() -> None:
        begin, stop = plan.span(job, item)

        @pl.when(item == 0)
        def first() -> None:
            turn[0] = 0
            pages.start(0, item, begin, jnp.int32(0))

        state.clear()
        turn[0] = lax.fori_loop(begin, stop, step, turn[0])
        for stream in range(job.streams):
            out[0, stream], lse[0, stream] = state.result(stream, out.dtype)


def _fetch_next(pages: Pages, item: jax.Array, tile: jax.Array, slot: jax.Array) -> None:
    """Fetch the item's next tile or, after its last, the next item's first."""
    _, stop = pages.plan.span(pages.job, item)
    last = tile + 1 == stop
    another = item + 1 < pages.plan.items[0]

    @pl.when(jnp.logical_not(last))
    def same() -> None:
        pages.start(0, item, tile + 1, slot)

    @pl.when(last & another)
    def following() -> None:
        begin, _ = pages.plan.span(pages.job, item + 1)
        pages.start(1, item + 1, begin, slot)


@dataclass(frozen=True)
class State:
    """Online softmax of each stream: peak and total [streams, R, 1], mixed [streams, R, D], all float32."""

    peak: Ref
    total: Ref
    mixed: Ref

    def clear(self) -> None:
        self.peak[...] = jnp.full(self.peak.shape, MASKED, jnp.float32)
        self.total[...] = jnp.zeros(self.total.shape, jnp.float32)
        self.mixed[...] = jnp.zeros(self.mixed.shape, jnp.float32)

    def result(self, stream: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Return the weighted mean of the values [R, D], and lse [1, R]."""
        mean = self.mixed[stream] / self.total[stream]
        return mean.astype(dtype), (self.peak[stream] + jnp.log(self.total[stream])).T

    def add(self, stream: int, score: jax.Array, v: jax.Array, precision: Any) -> None:
        """Add a tile's score [R, keys] and v [keys, D].

        A row that has seen no key yet gets weights from masked scores. Its first real score fades
        them to zero, and every row that counts has at least one real score: its own key's.
        """
        peak = jnp.maximum(self.peak[stream], jnp.max(score, axis=1, keepdims=True))
        weight = jnp.exp(score - peak)
        fade = jnp.exp(self.peak[stream] - peak)
        self.peak[stream] = peak
        self.total[stream] = self.total[stream] * fade + jnp.sum(weight, axis=1, keepdims=True)
        new = jnp.dot(weight.astype(v.dtype), v, preferred_element_type=jnp.float32, precision=precision)
        self.mixed[stream] = self.mixed[stream] * fade + new


@dataclass(frozen=True)
class RowRefs:
    """For each row of a stream: its token in the item, its kv head [R, 1], and the factor of its scores."""

    tokens: Ref
    kv_heads: Ref
    factors: Ref | None  # [streams, R, 1]


def _attend(
    pages: Pages,
    state: State,
    q: Ref,
    rows: RowRefs,
    wide: Sequence[Ref],
    item: jax.Array,
    tile: jax.Array,
    slot: jax.Array,
) -> None:
    """Attend to one tile; mask it only if some token of the item does not see some key of it."""
    job, plan, slots = pages.job, pages.plan, pages.slots
    first, end, begin = plan.firsts[item], plan.ends[item], tile * job.keys
    edge = begin + job.keys > first + 1
    if job.window is not None:
        edge = edge | (begin <= end - 1 - job.window)

    def compute(masked: bool) -> None:
        k_of, v_of = (_keys(job, ref[slot], spread) for ref, spread in zip(slots, wide or (None, None), strict=True))

        def scored(stream: int) -> jax.Array:
            score = _scores(job, q[0, stream], k_of(stream), rows.factors, stream)
            seen = _seen(job, rows, score.shape, first, begin, masked)
            return score if seen is None else jnp.where(seen, score, MASKED)

        score = scored(0)
        for stream in range(job.streams):
            # The next stream's scores are issued first, so the matrix unit works during this stream's softmax.
            ahead = scored(stream + 1) if stream + 1 < job.streams else score
            v = v_of(stream)
            if masked:
                # Unwritten keys may be NaN, and 0 * NaN is NaN.
                held = begin + _key(job, (v.shape[0], 1), 0) < end
                v = jnp.where(held, v.astype(jnp.float32), 0.0)
            state.add(stream, score, v.astype(job.dtype), _precision(job))
            score = ahead

    @pl.when(edge)
    def some() -> None:
        compute(True)

    @pl.when(jnp.logical_not(edge))
    def all_() -> None:
        compute(False)


def _keys(job: KernelStatics, tile: jax.Array, spread: Ref | None) -> Callable[[int], jax.Array]:
    """Return a function from streams to a tile's keys or values, given [pages, B * K, D]."""
    flat = (job.keys * job.shape.kv_heads, job.shape.dim)
    if job.streams == 1 or spread is None:
        whole = tile.astype(job.dtype).reshape(flat)
        return lambda stream: whole
    # Strided reads of rows need 32-bit elements.
    spread[...] = tile.astype(jnp.float32).reshape(flat)
    return lambda stream: spread[pl.ds(stream, job.keys, stride=job.shape.kv_heads), :]


def _scores(job: KernelStatics, q: jax.Array, k: jax.Array, factors: Ref | None, stream: int) -> jax.Array:
    """Return scores [R, keys] float32."""
    dims = (((1,), (1,)), ((), ()))
    k = k.astype(job.dtype)
    score = lax.dot_general(q, k, dims, precision=_precision(job), preferred_element_type=jnp.float32)
    score = score * (job.scale if factors is None else factors[stream])
    return score if job.softcap is None else job.softcap * jnp.tanh(score / job.softcap)


def _precision(job: KernelStatics) -> Any:
    return lax.Precision.HIGHEST if job.dtype == jnp.float32 else None


def _key(job: KernelStatics, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Return the tile's key index along `axis`; K is a power of two."""
    return lax.broadcasted_iota(jnp.int32, shape, axis) >> (job.heads.bit_length() - 1)


def _seen(
    job: KernelStatics, rows: RowRefs, shape: tuple[int, ...], first: jax.Array, begin: jax.Array, masked: bool
) -> jax.Array | None:
    """Return which scores count; None for all."""
    seen = None
    if job.heads > 1:
        seen = (lax.broadcasted_iota(jnp.int32, shape, 1) & (job.heads - 1)) == rows.kv_heads[...]
    if masked:
        behind = first + rows.tokens[...] - (begin + _key(job, shape, 1))  # [R, keys]
        causal = behind >= 0
        if job.window is not None:
            causal = causal & (behind < job.window)
        seen = causal if seen is None else seen & causal
    return seen


def paged_attention(
    q: jax.Array,  # [T, H, D]
    k_pool: jax.Array,  # [N, B, K, D]
    v_pool: jax.Array,  # [N, B, K, D]
    ragged: Ragged,
    work: WorkItems,  # of this step, cut into items of config.queries tokens
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    scales: Scales | None = None,
    config: Config,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Return out [T, H, D] in the dtype of q, and lse [T, H] float32; zeros and MASKED for tokens not in `work`.

        out[t, h] = sum_j softmax_j(cap(scale * q[t, h] . k[j, h // G])) v[j, h // G],  lse[t, h] = log sum_j exp(...)

    over the keys j of t's own row with p - window < j <= p, for t's position p, where cap(x) =
    softcap * tanh(x / softcap). Call it after the step's KV write, because a step's own keys and
    values are read from the pages. `interpret`: None compiles for a TPU; True or a
    `pltpu.InterpretParams` runs on the host.
    """
    shape = _shape(q, k_pool, v_pool)
    if not interpret and (reason := free_view(shape)) is not None:
        raise ValueError(reason)
    config.validate(shape)
    job = KernelStatics(config, shape, scale, window, softcap, scales is not None, q.dtype)
    packed, constants = _pack(job, q, work), _constants(job, scales)
    out, lse = _run(job, packed, constants, k_pool, v_pool, ragged.block_tables, work, interpret)
    out, lse = _unpack(job, out), _unpack(job, lse[..., None])[..., 0]  # [I * Q, H, D], [I * Q, H]
    at = jnp.minimum(work.slots, out.shape[0] - 1)
    taken = (work.slots < out.shape[0])[:, None]  # [T, 1]
    mixed = out[at]  # [T, H, D]
    if scales is not None:
        mixed = mixed * jnp.repeat(scales.v, shape.heads // shape.kv_heads)[None, :, None]
    # jnp.where instead of a product, because items that never ran left arbitrary values.
    return jnp.where(taken[..., None], mixed, 0).astype(q.dtype), jnp.where(taken, lse[at], MASKED)


def _shape(q: jax.Array, k_pool: jax.Array, v_pool: jax.Array) -> TpuShape:
    if q.ndim != 3 or k_pool.ndim != 4 or k_pool.shape != v_pool.shape or k_pool.dtype != v_pool.dtype:
        raise ValueError(f"q [T, H, D] is {q.shape}; pools [N, B, K, D] are {k_pool.shape} and {v_pool.shape}")
    if q.shape[2] != k_pool.shape[3] or q.shape[1] % k_pool.shape[2]:
        raise ValueError(f"{q.shape[1:]=} (H, D) must fit {k_pool.shape[2:]=} (K, D): equal D, H a multiple of K")
    _, page, kv_heads, dim = k_pool.shape
    return TpuShape(q.shape[1], kv_heads, dim, page, q.dtype.itemsize, k_pool.dtype.itemsize)


def _pack(job: KernelStatics, q: jax.Array, work: WorkItems) -> jax.Array:
    """Gather q [T, H, D] by item: [I, streams, R, D], rows of a stream ordered by (token, head)."""
    here = work.tokens[:, None] + jnp.arange(job.config.queries)[None]  # [I, Q]
    taken = q[jnp.minimum(here, q.shape[0] - 1)]  # [I, Q, H, D]
    streams, dim = job.streams, job.shape.dim
    split = taken.reshape(*here.shape, streams, -1, dim)
    return split.swapaxes(1, 2).reshape(here.shape[0], streams, -1, dim)


def _unpack(job: KernelStatics, x: jax.Array) -> jax.Array:
    """Reshape [I, streams, R, any] to [I * Q, H, any]."""
    items, streams, _, last = x.shape
    split = x.reshape(items, streams, job.config.queries, -1, last).swapaxes(1, 2)
    return split.reshape(items * job.config.queries, job.shape.heads, last)


def _constants(job: KernelStatics, scales: Scales | None) -> tuple[jax.Array, ...]:
    """Return, for each row of a stream, its token in the item [R, 1] and its kv head [R, 1].

    With `scales`, also the factor of its scores [streams, R, 1]. Computed on the host, because they
    divide by G.
    """
    shape, rows = job.shape, np.arange(job.config.rows(job.shape), dtype=np.int32)
    group = shape.heads // shape.kv_heads
    per_token = group * job.heads
    kv_head = (rows % per_token) // group
    constants = [jnp.asarray(x)[:, None] for x in (rows // per_token, kv_head)]
    if scales is not None:
        streams = np.arange(job.streams)[:, None]
        constants.append((scales.k * job.scale)[streams + kv_head][..., None].astype(jnp.float32))
    return tuple(constants)


def _run(
    job: KernelStatics,
    q: jax.Array,  # [I, streams, R, D]
    constants: tuple[jax.Array, ...],
    k_pool: jax.Array,
    v_pool: jax.Array,
    tables: jax.Array,
    work: WorkItems,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    items, streams, rows, dim = q.shape
    tables = tables[:, None]  # [S, 1, P], so that one row can be fetched
    page_rows = job.shape.page * job.shape.kv_heads  # B * K
    block = partial(pl.BlockSpec, index_map=lambda i, *_: (i, 0, 0, 0))
    slots = pltpu.VMEM((2, job.pages, page_rows, dim), k_pool.dtype)
    wide = () if job.config.mixed else (pltpu.VMEM((job.keys * job.shape.kv_heads, dim), jnp.float32),) * 2

    def here(i: Any, items: Any, row: Any, *_: Any) -> tuple[Any, int, int]:
        return row[i], 0, 0

    def there(i: Any, items: Any, row: Any, *_: Any) -> tuple[Any, int, int]:
        return row[jnp.minimum(i + 1, jnp.maximum(items[0] - 1, 0))], 0, 0

    run = pl.pallas_call(
        partial(body, job),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, jnp.float32 if job.scaled else q.dtype),
            jax.ShapeDtypeStruct((items, streams, 1, rows), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            # At least one item: an empty step still runs the grid once and does nothing.
            grid=(jnp.maximum(work.items[0], 1),),
            in_specs=[
                block((1, streams, rows, dim)),
                pl.BlockSpec((1, *tables.shape[1:]), here, memory_space=pltpu.SMEM),
                pl.BlockSpec((1, *tables.shape[1:]), there, memory_space=pltpu.SMEM),
                *(pl.BlockSpec(x.shape, lambda *_, rank=x.ndim: (0,) * rank) for x in constants),
                *(pl.BlockSpec(memory_space=pl.ANY),) * 2,
            ],
            out_specs=(block((1, streams, rows, dim)), block((1, streams, 1, rows))),
            scratch_shapes=[
                slots,
                slots,
                *wide,
                pltpu.VMEM((streams, rows, 1), jnp.float32),
                pltpu.VMEM((streams, rows, 1), jnp.float32),
                pltpu.VMEM((streams, rows, dim), jnp.float32),
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=job.config.vmem),
        interpret=pltpu.InterpretParams() if interpret is True else interpret or False,
        name=f"paged_attention_q{job.config.queries}",
    )
    pools = (pool.reshape(-1, page_rows, dim) for pool in (k_pool, v_pool))
    out, lse = run(work.items, work.rows, work.firsts, work.ends, q, tables, tables, *constants, *pools)
    return out, lse[:, :, 0]
