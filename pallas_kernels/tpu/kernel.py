"""Paged attention of items for one TPU core: what decode and prefill share.

An item is up to Q neighbouring tokens of one row (plan.py). The grid runs over items; inside, a loop runs over tiles
of C keys, whole pages brought by one copy each from the pool in HBM into one of two slots in VMEM, the next tile's
(or the next item's first one) under way while this one is computed. Softmax is online in float32. Tiles after an
item's last token or before its window are not read; only tiles at these edges are masked.

A page is seen as [B * K, D]: for D = 128 that is the pool as it lies in memory, and a free view of it. Its rows belong
to different kv heads in turn. Two ways to deal with that:

* mixed: all queries [Q * H, D] meet all rows [C * K, D], and scores of other kv heads are masked. K times the
  arithmetic, but as many loads of the matrix unit, which are what counts while Q * H is small.
* apart: the tile is spread to float32 once, each kv head's keys [C, D] read back with a stride.

A stream is what one product covers: one if mixed, else one per kv head.

Letters: T tokens, S rows, P pages per row, N pages in the pool, B page size, H query heads, K kv heads, G = H / K,
D head dim, I items, Q tokens of an item, C keys of a tile, R rows of a stream's products.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import MASKED, Ragged, Scales
from pallas_kernels.tpu.body import Job, body, pltpu
from pallas_kernels.tpu.config import Config, Shape, free_view
from pallas_kernels.tpu.plan import Work


def paged_attention(
    q: jax.Array,  # [T, H, D]
    k_pool: jax.Array,  # [N, B, K, D]
    v_pool: jax.Array,  # [N, B, K, D]
    ragged: Ragged,
    work: Work,  # of this step, cut into items of config.queries tokens
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    scales: Scales | None = None,
    config: Config,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """out [T, H, D] in the dtype of q, and lse [T, H] float32; zeros and MASKED for tokens not in `work`.

        out[t, h] = sum_j softmax_j(cap(scale * q[t, h] . k[j, h // G])) v[j, h // G],  lse[t, h] = log sum_j exp(...)

    over the keys j of t's own row with p - window < j <= p, where p is t's position; cap(x) = softcap * tanh(x /
    softcap). A step writes first: its own keys and values are read from the pages. `interpret`: None compiles for a
    TPU; True, or a `pltpu.InterpretParams`, runs it on the host.
    """
    shape = _shape(q, k_pool, v_pool)
    if not interpret and (reason := free_view(shape)) is not None:
        raise ValueError(reason)
    config.validate(shape)
    job = Job(config, shape, scale, window, softcap, scales is not None, q.dtype)
    packed, constants = _pack(job, q, work), _constants(job, scales)
    out, lse = _run(job, packed, constants, k_pool, v_pool, ragged.block_tables, work, interpret)
    out, lse = _unpack(job, out), _unpack(job, lse[..., None])[..., 0]  # [I * Q, H, D], [I * Q, H]
    at = jnp.minimum(work.slots, out.shape[0] - 1)
    taken = (work.slots < out.shape[0])[:, None]  # [T, 1]
    mixed = out[at]  # [T, H, D]
    if scales is not None:
        mixed = mixed * jnp.repeat(scales.v, shape.heads // shape.kv_heads)[None, :, None]
    # Selected, not multiplied: an item that never ran left whatever was there.
    return jnp.where(taken[..., None], mixed, 0).astype(q.dtype), jnp.where(taken, lse[at], MASKED)


def _shape(q: jax.Array, k_pool: jax.Array, v_pool: jax.Array) -> Shape:
    if q.ndim != 3 or k_pool.ndim != 4 or k_pool.shape != v_pool.shape or k_pool.dtype != v_pool.dtype:
        raise ValueError(f"q [T, H, D] is {q.shape}; pools [N, B, K, D] are {k_pool.shape} and {v_pool.shape}")
    if q.shape[2] != k_pool.shape[3] or q.shape[1] % k_pool.shape[2]:
        raise ValueError(f"{q.shape[1:]=} (H, D) must fit {k_pool.shape[2:]=} (K, D): equal D, H a multiple of K")
    _, page, kv_heads, dim = k_pool.shape
    return Shape(q.shape[1], kv_heads, dim, page, q.dtype.itemsize, k_pool.dtype.itemsize)


def _pack(job: Job, q: jax.Array, work: Work) -> jax.Array:
    """[T, H, D] -> [I, streams, R, D], rows of a stream in the order (token, head)."""
    here = work.tokens[:, None] + jnp.arange(job.config.queries)[None]  # [I, Q]
    taken = q[jnp.minimum(here, q.shape[0] - 1)]  # [I, Q, H, D]
    streams, dim = job.streams, job.shape.dim
    split = taken.reshape(*here.shape, streams, -1, dim)
    return split.swapaxes(1, 2).reshape(here.shape[0], streams, -1, dim)


def _unpack(job: Job, x: jax.Array) -> jax.Array:
    """[I, streams, R, any] -> [I * Q, H, any]."""
    items, streams, _, last = x.shape
    split = x.reshape(items, streams, job.config.queries, -1, last).swapaxes(1, 2)
    return split.reshape(items * job.config.queries, job.shape.heads, last)


def _constants(job: Job, scales: Scales | None) -> tuple[jax.Array, ...]:
    """Of each row of a stream: its token in the item [R, 1], its kv head [R, 1], and [streams, R, 1] what its scores
    are multiplied by, where keys are scaled. Division by G is for the host."""
    shape, rows = job.shape, np.arange(job.config.rows(job.shape), dtype=np.int32)
    group = shape.heads // shape.kv_heads
    per_token = group * job.heads
    kv_head = (rows % per_token) // group
    told = [jnp.asarray(x)[:, None] for x in (rows // per_token, kv_head)]
    if scales is not None:
        streams = np.arange(job.streams)[:, None]
        told.append((scales.k * job.scale)[streams + kv_head][..., None].astype(jnp.float32))
    return tuple(told)


def _run(
    job: Job,
    q: jax.Array,  # [I, streams, R, D]
    constants: tuple[jax.Array, ...],
    k_pool: jax.Array,
    v_pool: jax.Array,
    tables: jax.Array,
    work: Work,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    items, streams, rows, dim = q.shape
    tables = tables[:, None]  # [S, 1, P]: one row can be fetched by itself
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
            # One turn at least: an empty step leaves in it at once.
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
