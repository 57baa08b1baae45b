"""Combine the partial results that the workers of split-KV decode wrote for each row.

    out = sum_p 2^(w_p - w) o_p,  w = log2 sum_p 2^(w_p)

over the partials p of a row, which are adjacent. They are always added in order, so the same plan
gives the same bits.

Letters: S rows, X pairs of kv head and block of query tokens, M rows of their products, the first U
of them in use, D head dim.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import MASKED
from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.interpret import Interpret

TOGETHER = 4  # vectors per warpgroup
AHEAD = 4  # partials loaded before the first one is added, to hide the latency of loads
WARPGROUP = 128  # threads, which is the minimum length of a vector in registers


def combine(
    mixed: jax.Array,  # [parts, X, M, D] float32
    weight: jax.Array,  # [parts, X, M] float32, log2 of the sum of weights
    begins: jax.Array,  # [S] first part of each row
    counts: jax.Array,  # [S] parts of each row; 0 gives zeros and MASKED
    *,
    used: int,  # U
    dtype: Any,
    interpret: Interpret = None,
) -> tuple[jax.Array, jax.Array]:
    """Return out [S, X, >= U, D] of `dtype` and the natural log of the weights' sum [S, X, >= U], float32."""
    parts, pairs, height, dim = mixed.shape
    rows, share = begins.shape[0], max(1, WARPGROUP // dim)
    used = -(-used // share) * share
    groups, width = used // share, share * dim
    if width % WARPGROUP or used > height:
        raise ValueError(f"{dim=} must divide or be a multiple of {WARPGROUP}, and {used=} must be at most {height=}")
    together = next(n for n in (TOGETHER, 2, 1) if groups % n == 0)

    def body(mixed: Any, weight: Any, begins: Any, counts: Any, out: Any, lse: Any) -> None:
        row, pair, group = (lax.axis_index(name) for name in ("row", "pair", "group"))
        begin, count = begins[row], counts[row]
        first = [(group * together + n) * share for n in range(together)]  # row of the product

        def step(turn: Any, carry: list[_Sum]) -> list[_Sum]:
            parts = [turn * AHEAD + n for n in range(AHEAD)]
            added = []
            for at, old in zip(first, carry, strict=True):
                vectors, weights = [], []
                for p in parts:
                    here = begin + jnp.minimum(p, count - 1)
                    vectors.append(mixed[here, pair, pl.ds(at * dim, width)])
                    weights.append(
                        # Below any weight, so that a missing partial adds nothing even to an empty sum.
                        [jnp.where(p < count, weight[here, pair, at + i], 2 * MASKED) for i in range(share)]
                    )
                added.append(old.add(vectors, weights, dim))
            return added

        start = [_Sum.zero(width, share)] * together
        for at, done in zip(first, lax.fori_loop(0, lax.div(count + (AHEAD - 1), AHEAD), step, start), strict=True):
            safe = [jnp.maximum(total, 1e-30) for total in done.totals]
            vector = done.mixed * _spread([1.0 / total for total in safe], dim)
            out[row, pair, pl.ds(at * dim, width)] = vector.astype(dtype)
            for i in range(share):
                natural = (done.peaks[i] + jnp.log2(safe[i])) * math.log(2.0)
                lse[row, pair, at + i] = jnp.where(count > 0, natural, MASKED)

    run = compat.kernel(
        body,
        out=(
            jax.ShapeDtypeStruct((rows, pairs, used * dim), dtype),
            jax.ShapeDtypeStruct((rows, pairs, used), jnp.float32),
        ),
        scratch=(),
        grid=(("row", rows), ("pair", pairs), ("group", groups // together)),
        threads=("warpgroup", 1),
        interpret=interpret,
    )
    out, lse = run(mixed.reshape(parts, pairs, height * dim), weight, begins, counts)
    return out.reshape(rows, pairs, used, dim), lse


class _Sum(NamedTuple):
    """The running sum of `share` adjacent product rows in one vector: maximum weight, sum of weights, weighted sum."""

    mixed: jax.Array  # [share * D]
    peaks: list[Any]
    totals: list[Any]

    @classmethod
    def zero(cls, width: int, share: int) -> _Sum:
        return cls(jnp.zeros((width,), jnp.float32), [jnp.float32(MASKED)] * share, [jnp.float32(0.0)] * share)

    def add(self, vectors: list[jax.Array], weights: list[list[Any]], dim: int) -> _Sum:
        """Add several partials, with one weight per row of each vector."""
        tops, fades, totals, shares = [], [], [], []
        for old, total, *new in zip(self.peaks, self.totals, *weights, strict=True):
            top = reduce(jnp.maximum, new, old)
            fade, mine = jnp.exp2(old - top), [jnp.exp2(one - top) for one in new]
            tops.append(top)
            fades.append(fade)
            totals.append(sum(mine, total * fade))
            shares.append(mine)
        mixed = self.mixed * _spread(fades, dim)
        for vector, each in zip(vectors, zip(*shares, strict=True), strict=True):
            mixed = mixed + vector * _spread(list(each), dim)
        return _Sum(mixed, tops, totals)


def _spread(values: list[Any], dim: int) -> Any:
    """Broadcast one number to each `dim` lanes."""
    if len(values) == 1:
        return values[0]
    lane = lax.broadcasted_iota(jnp.int32, (len(values) * dim,), 0)
    wide = jnp.broadcast_to(values[-1], lane.shape)
    for n in reversed(range(len(values) - 1)):
        wide = jnp.where(lane < (n + 1) * dim, values[n], wide)
    return wide
