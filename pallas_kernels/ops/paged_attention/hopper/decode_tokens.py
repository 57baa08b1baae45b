"""Queries into a decode block, and its results out, both in the layers' layout [T, H, D].

Rows of [G, 64] of one token are copied by TMA to and from `stage`, which is not tiled, so that a
row of the product may belong to any token. Chunk c of 64 columns belongs to consumer c %
consumers: it fetches the queries of its chunks, adds what the other consumer mixed in them, and
stores them, so that `stage` needs no barrier between items.

The sum goes to `out` if the item is its row's only one, else to the item's partial result, which
decode_merge.py or combine.py adds to the others of the row. Only rows of the row's own tokens reach
`out`.

Letters: M rows of the product, G query heads of a kv head, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import MASKED
from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.compat import plgpu
from pallas_kernels.mosaic.interpret import is_interpreting
from pallas_kernels.ops.paged_attention.hopper.decode_block import WIDE, DecodeShape, Refs, Results
from pallas_kernels.ops.paged_attention.hopper.softmax import LOG2E

PEAKS, TOTALS = range(2)  # rows of `traded`


def fetch(shape: DecodeShape, refs: Refs, me: Any, row: Any) -> None:
    """Start copying this consumer's chunks of the queries of a row to `stage`."""
    s, head, first = refs.s, lax.axis_index("head"), lax.axis_index("block") * shape.block

    def chunk(c: int) -> None:
        def fetch_token(t: Any, _: Any) -> Any:
            # Copies are as many as the barrier expects, so tokens that the row lacks repeat its last one.
            token = refs.starts[row] + jnp.minimum(first + t, refs.lengths[row] - 1)
            source = refs.q.at[token, head, :, pl.ds(c * WIDE, WIDE)]
            target = s["stage"].at[c, pl.ds(t * shape.group, shape.group)]
            plgpu.copy_gmem_to_smem(source, target, s["q_full"].at[0])
            return _

        lax.fori_loop(0, shape.block, fetch_token, jnp.int32(0))

    for c in range(shape.spec.dim // WIDE):
        _if_mine(shape, me, c, partial(chunk, c))


def _if_mine(shape: DecodeShape, me: Any, c: int, do: Callable[[], None]) -> None:
    """Call `do` if chunk c belongs to this consumer."""
    if shape.config.consumers == 1:
        do()
    else:
        pl.when(me == c % shape.config.consumers)(do)


def _unknown(number: Any) -> Any:
    """Return 0, computed from a number of the item that is never negative.

    Otherwise the addresses of queries and results are computed once, before the loop over items,
    and held in registers that the loop over tiles lacks. Queries and results take different
    numbers, so that neither holds the other's addresses.
    """
    return jnp.minimum(number, 0)


def queries(shape: DecodeShape, refs: Refs, me: Any, row: Any, layout: Any) -> Any:
    """Return the queries: a ref in shared memory for warpgroup products, else a chunk of registers each 64 columns."""
    s, zero = refs.s, _unknown(row)
    plgpu.barrier_wait(s["q_full"].at[0])

    def chunk(c: int) -> jax.Array:
        return load(shape, s["stage"].at[c + zero], layout, optimized=False).astype(shape.spec.compute_dtype)

    def tile(c: int) -> None:
        s["q"][zero, :, pl.ds(c * WIDE, WIDE)] = chunk(c)

    chunks = range(shape.spec.dim // WIDE)
    if shape.config.warps:
        loaded = [chunk(c) for c in chunks]
        plgpu.commit_smem()  # ordinary loads have read `stage`, and TMA writes the next item's queries to it
        return loaded
    for c in chunks:
        _if_mine(shape, me, c, partial(tile, c))
    plgpu.commit_smem()
    _wait_for_others(shape, refs, 1)
    return s["q"].at[0]


def load(shape: DecodeShape, ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
    """Read shared memory into registers of `layout`, which the interpreter does without."""
    if is_interpreting(shape.interpret):
        plain: jax.Array = ref[...]
        return plain
    return compat.load(ref, layout, optimized=optimized)


def meet(shape: DecodeShape, refs: Refs, me: Any, peak: jax.Array, total: jax.Array, layout: Any) -> tuple[Any, Any]:
    """Return the maximum and the sum of weights over all consumers of rows of which this one has `peak` and `total`."""
    if shape.config.consumers == 1:
        return peak, total
    exchange = refs.s["traded"]
    exchange[me, PEAKS], exchange[me, TOTALS] = peak, total
    _wait_for_others(shape, refs, 0)
    # All consumers compute in the same order, so that they scale their chunks by the same number.
    read = partial(load, shape, layout=layout, optimized=False)
    peaks, totals = ([read(exchange.at[n, each]) for n in range(shape.config.consumers)] for each in (PEAKS, TOTALS))
    top = reduce(jnp.maximum, peaks)
    shares = [jnp.exp2(each_peak - top) * part for each_peak, part in zip(peaks, totals, strict=True)]
    return top, reduce(jnp.add, shares)


def _wait_for_others(shape: DecodeShape, refs: Refs, which: int) -> None:
    if shape.config.consumers > 1:
        plgpu.barrier_arrive(refs.s["met"].at[which])
        plgpu.barrier_wait(refs.s["met"].at[which])


def store(
    shape: DecodeShape, refs: Refs, me: Any, item: Any, row: Any, chunks: Sequence[jax.Array], layout: Any
) -> None:
    """Add up the consumers' `chunks` [M, 64], already scaled, and store the row's tokens."""
    added, zero = refs.s["added"], _unknown(refs.starts[row])

    def give(c: int) -> None:
        added[c + zero] = chunks[c]

    def take(c: int) -> None:
        if shape.config.consumers == 1:
            _store(shape, refs, item, row, c, chunks[c], added.at[zero])
        else:
            whole = chunks[c] + load(shape, added.at[c + zero], layout, optimized=False)
            _store(shape, refs, item, row, c, whole, added.at[c + zero])

    if shape.config.consumers > 1:
        for c in range(len(chunks)):
            pl.when(me != c % shape.config.consumers)(partial(give, c))
    _wait_for_others(shape, refs, 1)
    for c in range(len(chunks)):
        _if_mine(shape, me, c, partial(take, c))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store(shape: DecodeShape, refs: Refs, item: Any, row: Any, c: int, whole: jax.Array, added: Any) -> None:
    """Store chunk c of an item to `out`, or to its partial result by way of `added`."""
    head, block, part = lax.axis_index("head"), lax.axis_index("block"), refs.part[item]

    @pl.when(part < 0)
    def _() -> None:
        stage = refs.s["stage"].at[c + _unknown(refs.starts[row])]
        stage[...] = whole.astype(shape.spec.dtype)
        plgpu.commit_smem()
        copy_out(shape, refs, row, c, stage)

    @pl.when(part >= 0)
    def _() -> None:
        added[...] = whole
        plgpu.commit_smem()
        if shape.results is Results.MERGED:
            plgpu.copy_smem_to_gmem(added.at[pl.ds(0, shape.kept)], refs.mixed.at[part, head, block, c])
        else:
            _copy_tokens(shape, refs, row, c, added, lambda t: refs.mixed.at[part, t])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def copy_out(shape: DecodeShape, refs: Refs, row: Any, c: Any, source: Any) -> None:
    """Start copying chunk c of a row's tokens from `source` [M, 64] to `out`."""
    _copy_tokens(shape, refs, row, c, source, lambda t: refs.out.at[refs.starts[row] + t])


def _copy_tokens(shape: DecodeShape, refs: Refs, row: Any, c: Any, source: Any, target: Callable[[Any], Any]) -> None:
    head, first = lax.axis_index("head"), lax.axis_index("block") * shape.block

    def copy_token(t: Any, _: Any) -> Any:
        rows = source.at[pl.ds(t * shape.group, shape.group)]
        plgpu.copy_smem_to_gmem(rows, target(first + t).at[head, :, pl.ds(c * WIDE, WIDE)])
        return _

    lax.fori_loop(0, jnp.clip(refs.lengths[row] - first, 0, shape.block), copy_token, jnp.int32(0))


def weigh(
    shape: DecodeShape, refs: Refs, me: Any, item: Any, row: Any, top: Any, total: Any, put: Callable[[Any, Any], None]
) -> None:
    """Store an item's sum of weights by `put(value [M], ref)`: its natural log to `lse`, or its log2 to its part.

    If `merged`, each consumer stores its own copy of the latter, else the first one stores both.
    """
    place, part = (lax.axis_index("head"), lax.axis_index("block")), refs.part[item]
    binary = top + jnp.log(jnp.maximum(total, 1e-30)) * LOG2E
    mine, copy = ((True, part * shape.config.consumers + me)) if shape.results is Results.MERGED else (me == 0, part)

    @pl.when((me == 0) & (part < 0))
    def _() -> None:
        put(jnp.where(total > 0, binary * math.log(2.0), MASKED), refs.lse.at[(row, *place)])

    @pl.when(mine & (part >= 0))
    def _() -> None:
        put(jnp.where(total > 0, binary, MASKED), refs.weight.at[(copy, *place)])
