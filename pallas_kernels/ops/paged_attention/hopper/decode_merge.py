"""Merge the partial results of a split row in the decode kernel itself, by the last of its workers.

    out = sum_p 2^(w_p - w) o_p,  w = log2 sum_p 2^(w_p)

over the partials p of a row, always added in their order on the line, so the bits do not depend on
which worker is last. No worker waits for another: each counts when its partial is stored, and the
one that counts last merges. Each consumer has its own chunks of columns, copy of the weights and
counter, so consumers need not wait for each other either. The last one leaves the counter as it
was, so a layer of the step finds it as the one before did.

Letters: M rows of the product, the first U of them in use, D head dim.
"""

from __future__ import annotations

import math
from functools import partial, reduce
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import MASKED
from pallas_kernels.mosaic.compat import plgpu
from pallas_kernels.mosaic.countdown import is_last
from pallas_kernels.mosaic.interpret import cast, filled
from pallas_kernels.mosaic.spread import spread
from pallas_kernels.ops.paged_attention.hopper.decode_block import WIDE, DecodeShape, Refs
from pallas_kernels.ops.paged_attention.hopper.decode_tokens import copy_out, load
from pallas_kernels.ops.paged_attention.plan import part_of

HELD = 8192  # numbers loaded before the first partial is added, to hide the latency of loads: 64 registers


def merge_if_last(shape: DecodeShape, refs: Refs, me: Any, item: Any, row: Any) -> None:
    """Count an item of a split row whose partial result is stored, and merge the row if it is the last."""
    place = lax.axis_index("head"), lax.axis_index("block")

    @pl.when(refs.part[item] >= 0)
    def _() -> None:
        plgpu.wait_smem_to_gmem(0)
        last = is_last(refs.left.at[(row, *place, me)], refs.splits[row] - 1, shape.interpret)
        pl.when(last)(lambda: _merge(shape, refs, me, row))


def _merge(shape: DecodeShape, refs: Refs, me: Any, row: Any) -> None:
    place, kept = (lax.axis_index("head"), lax.axis_index("block")), pl.ds(0, shape.kept)
    layout = spread((shape.kept,), WIDE)
    ahead = max(1, min(4, HELD // (shape.kept * WIDE)))
    worker, count = refs.worker[row], refs.splits[row]

    def wide(x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(x, (shape.kept, WIDE), (0,))

    def chunk(n: Any, carry: Any) -> Any:
        c = n * shape.config.consumers + me

        def step(turn: Any, so_far: Any) -> Any:
            mixed, peak, total = so_far
            numbers = [turn * ahead + n for n in range(ahead)]
            parts = [part_of(worker + (n := jnp.minimum(number, count - 1)), n > 0) for number in numbers]
            vectors = [load(shape, refs.mixed.at[(part, *place, c)], layout, optimized=False) for part in parts]
            weight_refs = [refs.weight.at[(part * shape.config.consumers + me, *place, kept)] for part in parts]
            weights = [load(shape, ref, layout.reduce(1), optimized=False) for ref in weight_refs]
            # Below any weight, so that a missing partial adds nothing even to an empty sum.
            most = [jnp.where(n < count, -MASKED, 2 * MASKED) for n in numbers]
            weights = [jnp.minimum(weight, each) for weight, each in zip(weights, most, strict=True)]
            top = reduce(jnp.maximum, weights, peak)
            fade, shares = jnp.exp2(peak - top), [jnp.exp2(weight - top) for weight in weights]
            mixed = mixed * wide(fade)
            for vector, share in zip(vectors, shares, strict=True):
                mixed = mixed + vector * wide(share)
            return mixed, top, sum(shares, total * fade)

        full = partial(filled, interpret=shape.interpret)
        start = (
            full(0.0, (shape.kept, WIDE), layout),
            full(MASKED, (shape.kept,), layout.reduce(1)),
            full(0.0, (shape.kept,), layout.reduce(1)),
        )
        mixed, peak, total = lax.fori_loop(0, lax.div(count + (ahead - 1), jnp.int32(ahead)), step, start)
        total = jnp.maximum(total, 1e-30)
        stage = refs.s["stage"].at[c]
        stage[kept] = (mixed / wide(total)).astype(shape.spec.dtype)
        plgpu.commit_smem()
        copy_out(shape, refs, row, c, stage)

        @pl.when(c == 0)
        def _() -> None:
            refs.lse[(row, *place, kept)] = (peak + jnp.log2(total)) * math.log(2.0)

        return carry

    chunks = shape.spec.dim // WIDE
    lax.fori_loop(
        0, lax.div(chunks - me + (shape.config.consumers - 1), jnp.int32(shape.config.consumers)), chunk, jnp.int32(0)
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def blank(shape: DecodeShape, refs: Refs, me: Any) -> None:
    """Store zeros for the padding tokens, shared out among the consumers of a head's workers."""
    first = lax.axis_index("worker") * shape.config.consumers + me
    step, begin = lax.axis_size("worker") * shape.config.consumers, refs.tokens[0] + first
    heads = pl.ds(0, shape.group) if shape.group > 1 else 0
    layout = spread((shape.group,) * (shape.group > 1), shape.spec.dim)

    def clear(turn: Any, _: Any) -> Any:
        zeros = jnp.zeros((shape.group, shape.spec.dim) if shape.group > 1 else (shape.spec.dim,), shape.spec.dtype)
        refs.out[begin + turn * step, lax.axis_index("head"), heads] = cast(zeros, layout, shape.interpret)
        return _

    @pl.when(lax.axis_index("block") == 0)
    def _() -> None:
        turns = lax.div(jnp.maximum(refs.out.shape[0] - begin + (step - 1), 0), jnp.int32(step))
        lax.fori_loop(0, turns, clear, jnp.int32(0))
