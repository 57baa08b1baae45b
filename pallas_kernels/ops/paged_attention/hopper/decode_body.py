"""The kernel body of decode attention: a producer warpgroup feeds tiles of keys and values to consumers.

A block is one worker of the plan, for one kv head (and one group of query tokens, if they exceed M
rows). Its producer walks through the worker's items and copies their tiles, page by page, into a
ring of `stages` slots, without a pause between items. There are three kinds of consumers:

* `_consume`: consumer c takes every tile g with g % consumers == c, counted over all items, so a
  slot always belongs to the same consumer. At the end of an item the consumers add up their mixed
  values, divided by the weight of both, and store the row's tokens (decode_tokens.py). The last
  worker of a split row merges its items (decode_merge.py), or combine.py does. If `apart`, each
  consumer writes its own partial result of each item, and the log2 of its weight.
* `consume_bytes`, for 8-bit pools and few rows: nothing is widened in shared memory. Each of a
  consumer's four warps takes 16 of every 64 keys of a tile, for all 16 query rows, with its own
  softmax over the tiles of an item (fragments.py); row 16 w + r is warp w's. In the loop, warps
  synchronize only to free a slot, as soon as its data is in registers. At the end of an item they
  exchange peaks and sums and add up their mixed values through shared memory.
* `joint`, for 16-bit latents (MLA) with warpgroup products: two consumers share every tile
  (ops/mla/hopper.py).

The values of a latent are the first columns of its keys, so there is one ring. With
`consume_bytes`, a latent's mixed values take twice the registers of a warpgroup, so each of two
consumers has half of the columns and takes every tile. Both compute all scores, which is more
products, but they never wait for each other.

Letters: M rows of the product (query tokens times G, padded), C tokens of keys in a tile, D head
dim, R columns of the values, W value columns of a product, B page size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import MASKED
from pallas_kernels.mosaic import compat, fragments
from pallas_kernels.mosaic.compat import plgpu
from pallas_kernels.mosaic.fragments import ROWS, WARPS
from pallas_kernels.mosaic.interpret import filled, is_interpreting, mma, wgmma
from pallas_kernels.mosaic.widen import tiled, widened
from pallas_kernels.ops.paged_attention.hopper.decode_block import (
    MEETING,
    WIDE,
    DecodeShape,
    Refs,
    Results,
    Split,
    each_item,
    last_key,
    mask,
    mine,
    produce,
    release,
    scale_of,
    soften,
)
from pallas_kernels.ops.paged_attention.hopper.decode_merge import blank, merge_if_last
from pallas_kernels.ops.paged_attention.hopper.decode_tokens import fetch, load, meet, queries, store, weigh
from pallas_kernels.ops.paged_attention.hopper.softmax import LOG2E, unit_of

Consume = Callable[[DecodeShape, Refs, Any], None]
PART = 128  # columns widened at a time; more would need registers that wide heads lack
CHUNK = 64  # dimensions of queries held in registers as one array
PLANNED = 9  # arrays of the plan and of the step, `Refs.table` to `Refs.contexts`
MERGING = 4  # arrays of merging, `Refs.worker` to `Refs.left`


def body(shape: DecodeShape, joint: Consume | None = None) -> Callable[..., None]:
    """Return the kernel over the grid (worker, block, head) and threads `role`: consumers first, then the producer.

    `joint` is the consumer of `Split.SHARED`.
    """

    def run(*arrays: Any, **scratch: Any) -> None:
        pools, rest = ((arrays[1],) * 2, arrays[2:]) if shape.latent else (arrays[1:3], arrays[3:])
        planned, rest = rest[:PLANNED], rest[PLANNED:]
        merging, rest = (
            (rest[:MERGING], rest[MERGING:]) if shape.results is Results.MERGED else ((None,) * MERGING, rest)
        )
        scales, results = (rest[:2], rest[2:]) if shape.spec.quantized and not shape.latent else ((None, None), rest)
        refs = Refs._make([arrays[0], *pools, *planned, *merging, *scales, *(*results, None, None)[:4], scratch])
        role = lax.axis_index("role")

        @pl.when(role < shape.config.consumers)
        def _() -> None:
            _registers(shape, consumer=True)
            consume = {Split.TILES: _consume, Split.WARPS: consume_bytes, Split.SHARED: joint}[shape.split]
            assert consume is not None, "consumers that share tiles need `joint`"
            if shape.results is Results.MERGED:
                blank(shape, refs, role)
            consume(shape, refs, role)

        @pl.when(role == shape.config.consumers)
        def _() -> None:
            _registers(shape, consumer=False)
            produce(shape, refs)

    return run


def _registers(shape: DecodeShape, *, consumer: bool) -> None:
    if shape.config.warps and not shape.whole:  # these blocks need few registers, so that two share a core
        return
    # The producer holds the page numbers of a tile, and a shared tile has twice the pages.
    most, least = (224, 56) if shape.split is Split.SHARED else (248 if shape.config.consumers == 1 else 232, 40)
    if consumer:
        plgpu.set_max_registers(most, action="increase")
    else:
        plgpu.set_max_registers(least, action="decrease")


def _consume(shape: DecodeShape, refs: Refs, me: Any) -> None:
    s, block, head = refs.s, lax.axis_index("block"), lax.axis_index("head")
    acc_layout = shape.layout("ACC", jnp.float32 if shape.config.warps else None)

    raw, full = shape.scale * scale_of(refs.k_scale, head), partial(filled, interpret=shape.interpret)
    unit = unit_of(raw, shape.softcap)

    def attend(item: Any, number: Any, row: Any, tiles: Any, done: Any) -> None:
        first, half = refs.first[item], lax.rem(number, shape.queues)
        if shape.results is Results.PACKED:
            plgpu.barrier_wait(s["q_full"].at[half])
            q = s["q"].at[half]
        else:
            fetch(shape, refs, me, row)
            q = queries(shape, refs, me, row, shape.layout("LHS"))
        position = last_key(shape, refs, row)

        def step(j: Any, carry: Any) -> Any:
            acc, peak, total = carry
            tile = begin + j * shape.config.consumers
            slot = shape.place(done + tile)
            plgpu.barrier_wait(s["k_full"].at[slot])
            score = _scores(shape, s, q, slot, me)
            score = mask(shape, score, (first + tile) * shape.config.tile, position, raw)
            weight, fade, top = soften(score, peak, unit)
            # In warp-level products a row is spread over four warps, so sums are reduced only once per item.
            if shape.config.warps:
                total = total * lax.broadcast_in_dim(fade, total.shape, (0,)) + weight
            else:
                total = total * fade + jnp.sum(weight, axis=1)
            acc = [part * lax.broadcast_in_dim(fade, part.shape, (0,)) for part in acc]
            acc = _mix(shape, s, acc, weight.astype(shape.spec.compute_dtype), slot, me)
            return acc, top, total

        begin, count = mine(shape, me, tiles, done)
        start = (
            [full(0.0, (shape.rows, shape.width), acc_layout)] * (shape.values // shape.width),
            full(MASKED, (shape.rows,), acc_layout.reduce(1)),
            full(0.0, (shape.rows, shape.config.tile), acc_layout)
            if shape.config.warps
            else full(0.0, (shape.rows,), acc_layout.reduce(1)),
        )
        acc, peak, total = lax.fori_loop(0, count, step, start)
        total = jnp.sum(total, axis=1) if shape.config.warps else total
        if shape.results is Results.PACKED:
            release(shape, s["q_free"].at[half])
            _store_apart(shape, refs, (item * shape.config.consumers + me, head, block), (acc, peak, total))
            return
        top, total = meet(shape, refs, me, peak, total, acc_layout.reduce(1))
        factor = jnp.exp2(peak - top) * (scale_of(refs.v_scale, head) / jnp.maximum(total, 1e-30))
        store(shape, refs, me, item, row, _chunks(acc[0], factor), acc_layout)

        weigh(shape, refs, me, item, row, top, total, _put)
        if shape.results is Results.MERGED:
            merge_if_last(shape, refs, me, item, row)

    each_item(shape, refs, attend)


def _chunks(mixed: jax.Array, factor: jax.Array) -> list[jax.Array]:
    """Return mixed [M, D] times factor [M], in chunks of 64 columns."""
    parts = [mixed[:, at : at + WIDE] for at in range(0, mixed.shape[1], WIDE)]
    return [part * lax.broadcast_in_dim(factor, part.shape, (0,)) for part in parts]


def _put(value: jax.Array, target: Any) -> None:
    target[...] = value


def _store_apart(
    shape: DecodeShape, refs: Refs, place: tuple[Any, ...], state: tuple[list[jax.Array], jax.Array, jax.Array]
) -> None:
    acc, peak, total = state
    safe = jnp.maximum(total, 1e-30)
    factor = scale_of(refs.v_scale, place[1]) / safe
    for n, mixed in enumerate(acc):
        columns = (slice(None), pl.ds(n * shape.width, shape.width)) if len(acc) > 1 else ()
        refs.mixed[(*place, *columns)] = mixed * lax.broadcast_in_dim(factor, mixed.shape, (0,))
    refs.weight[place] = jnp.where(total > 0, peak + jnp.log(safe) * LOG2E, MASKED)


def _scores(shape: DecodeShape, s: dict[str, Any], q: Any, slot: Any, me: Any) -> jax.Array:
    """Compute q k^T [M, C], unscaled, and release the slot of keys, except for a latent."""
    keys = s["k"].at[slot]
    if shape.spec.quantized:
        keys = _widen(shape, s, "k", slot, me)
    if shape.config.warps:
        score = filled(0.0, (shape.rows, shape.config.tile), shape.layout("ACC", jnp.float32), shape.interpret)
        for n, begin in enumerate(range(0, shape.spec.dim, CHUNK)):
            every = (slice(None), pl.ds(begin, CHUNK))
            left = compat.load(q.at[every], shape.layout("LHS"), optimized=False) if shape.latent else q[n]
            here = keys.at[every]
            if is_interpreting(shape.interpret):
                score = mma(score, left, here[...].T, shape.interpret)
            else:
                right = compat.load(compat.transpose(here), shape.layout("RHS"), optimized=False)
                score = mma(score, left, right, shape.interpret)
    else:
        score = wgmma(q, keys, transposed=True, interpret=shape.interpret)
    if not shape.spec.quantized and not shape.latent:
        release(shape, s["k_free"].at[slot])
    return score


def _mix(
    shape: DecodeShape, s: dict[str, Any], acc: list[jax.Array], weight: jax.Array, slot: Any, me: Any
) -> list[jax.Array]:
    """Add weight v to acc [M, R], in column parts, and release the slot of values."""
    left: Any = weight
    if "p" in s:
        s["p"][me] = weight
        left = s["p"].at[me]
        if not shape.config.warps:  # warp-level products read it with ordinary loads, as it was written
            plgpu.commit_smem()
    side = "k" if shape.latent else "v"
    if not shape.latent:
        plgpu.barrier_wait(s["v_full"].at[slot])
    values = s[side].at[slot]
    if shape.spec.quantized:
        values = _widen(shape, s, "v", slot, me)
    if shape.config.warps:
        left = compat.load(left, shape.layout("LHS"), optimized=False)
        for n in range(len(acc)):
            columns = (slice(None), pl.ds(n * shape.width, shape.width))
            here = values.at[columns] if shape.latent else values
            right = compat.load(here, shape.layout("RHS"), optimized=False)
            acc = [*acc[:n], mma(acc[n], left, right, shape.interpret), *acc[n + 1 :]]
    else:
        acc = [wgmma(left, values, *acc, interpret=shape.interpret)]
    if not shape.spec.quantized:
        release(shape, s[f"{side}_free"].at[slot])
    return acc


def _widen(shape: DecodeShape, s: dict[str, Any], name: str, slot: Any, me: Any) -> Any:
    """Widen a slot of 8-bit values into shared memory and release the slot."""
    for begin in range(0, shape.spec.dim, PART):
        columns = pl.ds(begin, min(PART, shape.spec.dim - begin))
        s["wide"][me, :, columns] = widened(s[name].at[slot, :, columns], shape.spec.compute_dtype, shape.interpret)
    plgpu.commit_smem()
    plgpu.barrier_arrive(s[f"{name}_free"].at[slot])
    return s["wide"].at[me]


def consume_bytes(shape: DecodeShape, refs: Refs, me: Any) -> None:
    """Attend to 8-bit keys and values, each warp with its own keys and softmax (see the module)."""
    s, block, head = refs.s, lax.axis_index("block"), lax.axis_index("head")
    raw, full = shape.scale * scale_of(refs.k_scale, head), partial(filled, interpret=shape.interpret)
    unit = unit_of(raw, shape.softcap)

    def attend(item: Any, number: Any, row: Any, tiles: Any, done: Any) -> None:
        first, half = refs.first[item], lax.rem(number, shape.queues)
        q = None
        if shape.results is Results.PACKED:
            plgpu.barrier_wait(s["q_full"].at[half])
            if not shape.latent:
                every = [s["q"].at[half, :, pl.ds(begin, CHUNK)] for begin in range(0, shape.spec.dim, CHUNK)]
                q = [load(shape, ref, fragments.queries(), optimized=False) for ref in every]
        else:
            fetch(shape, refs, me, row)
            q = queries(shape, refs, me, row, fragments.queries())
        position = last_key(shape, refs, row)
        begin, count = (jnp.int32(0), tiles) if shape.whole else mine(shape, me, tiles, done)

        def step(j: Any, carry: Any) -> Any:
            mixed, peak, total = carry
            tile = begin + j * (1 if shape.whole else shape.config.consumers)
            slot = shape.place(done + tile)
            plgpu.barrier_wait(s["k_full"].at[slot])
            score = _byte_scores(shape, s, q, half, slot)
            score = mask(shape, score, (first + tile) * shape.config.tile, position, raw)
            weight, fade, peak = soften(score, peak, unit)
            fresh = [weight[:, at : at + _kept(shape)] for at in range(0, weight.shape[1], _kept(shape))]
            # Partial sums; reduced once per item.
            total = total * lax.broadcast_in_dim(fade, total.shape, (0,)) + reduce(jnp.add, fresh)
            mixed = [part * lax.broadcast_in_dim(fade, part.shape, (0,)) for part in mixed]
            return _byte_mix(shape, s, mixed, weight, slot, me), peak, total

        layout = plgpu.Layout.WGMMA
        nothing = [full(0.0, (WARPS * ROWS, shape.width), layout)] * (shape.mixed // shape.width)
        start = nothing, full(MASKED, (WARPS * ROWS,), layout.reduce(1))
        sums = full(0.0, (WARPS * ROWS, _kept(shape)), layout)
        mixed, peak, total = lax.fori_loop(0, count, step, (*start, sums))
        top, total = _among_warps(shape, refs, me, peak, jnp.sum(total, axis=1))
        put = partial(_put_rows, refs, me)
        if shape.results is Results.PACKED:
            release(shape, s["q_free"].at[half])
            place = (item if shape.whole else item * shape.config.consumers + me, head, block)
            _store_summed(shape, refs, me, place, (mixed, jnp.exp2(peak - top), total))
            weight = jnp.where(total > 0, top + jnp.log(jnp.maximum(total, 1e-30)) * LOG2E, MASKED)
            pl.when((me == 0) if shape.whole else me >= 0)(lambda: put(weight, refs.weight.at[place]))
            return
        top, total = meet(shape, refs, me, top, total, layout.reduce(1))
        factor = jnp.exp2(peak - top) * (scale_of(refs.v_scale, head) / jnp.maximum(total, 1e-30))
        chunks = [_sum_warps(shape, refs, me, chunk) for chunk in _chunks(mixed[0], factor)]
        store(shape, refs, me, item, row, chunks, _summed())
        weigh(shape, refs, me, item, row, top, total, put)
        if shape.results is Results.MERGED:
            merge_if_last(shape, refs, me, item, row)

    each_item(shape, refs, attend)


def _kept(shape: DecodeShape) -> int:
    """Return the columns of weight sums kept until the end of an item; few for latents, to save registers."""
    return 8 if shape.latent else shape.config.tile // WARPS


def _byte_scores(shape: DecodeShape, s: dict[str, Any], q: list[jax.Array] | None, half: Any, slot: Any) -> jax.Array:
    """Compute scores [64, C / 4], and release the slot of keys, except for a latent.

    A latent's queries (`q` None) do not fit registers and are read in chunks.
    """
    every = [pl.ds(begin, fragments.CHUNK) for begin in range(0, shape.spec.dim, fragments.CHUNK)]
    score, keys = None, []
    if q is not None:  # all keys are in registers before the first product, so that their slot is free early
        keys = [load(shape, s["k"].at[slot, :, columns], fragments.keys()) for columns in every]
        release(shape, s["k_free"].at[slot])
    for n, columns in enumerate(every):
        if q is not None:
            left, right = q[n], keys[n]
        else:
            left = load(shape, s["q"].at[half, :, columns], fragments.queries(), optimized=False)
            right = load(shape, s["k"].at[slot, :, columns], fragments.keys())
        score = fragments.scores(left, right, shape.interpret, score, ready=q is None)
    assert score is not None
    return score


def _byte_mix(
    shape: DecodeShape, s: dict[str, Any], mixed: list[jax.Array], weight: jax.Array, slot: Any, me: Any
) -> list[jax.Array]:
    """Add weight v to each of mixed [64, W], and release the slot of values."""
    if not shape.latent:
        plgpu.barrier_wait(s["v_full"].at[slot])
        values = load(shape, s["v"].at[slot], fragments.values(shape.spec.dim))
        release(shape, s["v_free"].at[slot])
        return [fragments.mix(mixed[0], weight.astype(shape.spec.compute_dtype), values, shape.interpret)]
    weight = weight.astype(shape.spec.compute_dtype)
    sums = []
    for n, part in enumerate(mixed):
        columns = pl.ds(me * shape.mixed + n * shape.width, shape.width)
        values = load(shape, s["k"].at[slot, :, columns], fragments.values(shape.width))
        sums.append(fragments.mix(part, weight, values, shape.interpret))
    release(shape, s["k_free"].at[slot])
    return sums


def _among_warps(shape: DecodeShape, refs: Refs, me: Any, peak: jax.Array, total: jax.Array) -> tuple[Any, Any]:
    """Return the maximum and the sum of weights [64] over the four warps, which have the same rows."""
    among = refs.s["among"].at[me]
    top = _among(shape, among, peak, lax.max)
    return top, _among(shape, among, total * jnp.exp2(peak - top), lax.add)


def _among(
    shape: DecodeShape, exchange: Any, x: jax.Array, join: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """Reduce x [64] with `join` over the same query row of the four warps."""
    for begin in (0, WARPS * ROWS):
        exchange[pl.ds(begin, WARPS * ROWS)] = x
    plgpu.commit_smem()
    layout = plgpu.Layout.WGMMA.reduce(1)
    turned = [exchange.at[pl.ds(ROWS * w, WARPS * ROWS)] for w in range(1, WARPS)]
    joined = reduce(join, [load(shape, ref, layout, optimized=False) for ref in turned], x)
    plgpu.commit_smem()  # all warps have read it
    return joined


def _put_rows(refs: Refs, me: Any, value: jax.Array, target: Any) -> None:
    """Store value [64], the same in each warp, to target [16]."""
    among = refs.s["among"].at[me]
    among[pl.ds(0, WARPS * ROWS)] = value
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(among.at[pl.ds(0, ROWS)], target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _sum_warps(shape: DecodeShape, refs: Refs, me: Any, chunk: jax.Array) -> jax.Array:
    """Return the sum [16, MEETING] of the four warps' rows of chunk [64, MEETING]."""
    summed = refs.s["summed"].at[me, :, pl.ds(0, MEETING)]
    summed[...] = chunk
    plgpu.commit_smem()
    parts = [load(shape, summed.at[pl.ds(ROWS * w, ROWS)], _summed(), optimized=False) for w in range(WARPS)]
    plgpu.commit_smem()  # all warps have read it
    return reduce(jnp.add, parts)


def _summed() -> Any:
    """Return the register layout of the warps' sums [16, MEETING], with rows contiguous in global memory."""
    return tiled((16, 64), (4, 64), (2, 64), (4,), warps=(-7,), lanes=(-3, -2))


def _store_summed(
    shape: DecodeShape, refs: Refs, me: Any, place: tuple[Any, ...], state: tuple[list[jax.Array], jax.Array, jax.Array]
) -> None:
    """Store a consumer's mixed values, of a latent those of its own columns, summed over the warps."""
    mixed, fade, total = state
    factor = fade * (scale_of(refs.v_scale, place[1]) / jnp.maximum(total, 1e-30))
    first = me * shape.mixed if shape.whole else 0
    for n, part in enumerate(mixed):
        for at, chunk in enumerate(_chunks(part, factor)):
            column = first + n * shape.width + at * MEETING
            refs.mixed[(*place, slice(None), pl.ds(column, MEETING))] = _sum_warps(shape, refs, me, chunk)
