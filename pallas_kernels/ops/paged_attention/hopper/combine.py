"""Combine the partial results that the workers of split-KV decode wrote for each row, and blank padding tokens.

    out = sum_p 2^(w_p - w) o_p,  w = log2 sum_p 2^(w_p)

over the partials p of a row. They are always added in order, so the same plan gives the same bits.

Letters: T tokens, S rows, H heads, K groups of G heads, Q query tokens of a row, in blocks of Q', M
rows of the products, R columns of the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import MASKED
from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.compat import plgpu
from pallas_kernels.mosaic.interpret import Interpret, iota
from pallas_kernels.ops.paged_attention.plan import part_of

TOGETHER = 4  # vectors per warpgroup
AHEAD = 4  # partials loaded before the first one is added, to hide the latency of loads
LANES = 128  # threads of a warpgroup, and the numbers of a vector


class Partials(NamedTuple):
    """What the workers wrote. If not `by_token`, the partials of row s are begins[s] to begins[s] + counts[s] - 1."""

    mixed: jax.Array  # [parts, Q, H * R] float32, or [parts, K, Q / Q', M, R] if not `by_token`
    weight: jax.Array  # [parts, K, Q / Q', M] float32, log2 of the sum of weights
    begins: jax.Array  # [S] int32, the first partial, or if `by_token` the first worker
    counts: jax.Array  # [S] int32, 0 for rows that are not combined here
    starts: jax.Array  # [S] int32, first token of the row
    lengths: jax.Array  # [S] int32
    tokens: jax.Array  # [1] int32, tokens of the step; the others are padding


@dataclass(frozen=True)
class Combine:
    """The static parameters of the kernel."""

    heads: int  # H
    group: int  # G
    block: int  # Q'
    columns: int  # R
    by_token: bool  # the layout of the partials
    interpret: Interpret

    def __post_init__(self) -> None:
        if self.length < LANES or self.columns % (LANES // 2):
            raise ValueError(f"{self.heads=} of {self.columns=} must be at least {LANES} numbers, in multiples of 64")

    @property
    def length(self) -> int:
        """The numbers of a token."""
        return self.heads * self.columns

    @property
    def together(self) -> int:
        """Vectors of a block; all of them if the last one overlaps the one before, as one block writes both."""
        vectors = -(-self.length // LANES)
        return vectors if self.length % LANES else next(n for n in (TOGETHER, 3, 2, 1) if vectors % n == 0)

    @property
    def groups(self) -> int:
        """Blocks per token."""
        return -(-self.length // LANES) // self.together

    def begin(self, group: Any, n: int) -> Any:
        """Return the first number of the block's n-th vector."""
        return jnp.minimum((group * self.together + n) * LANES, self.length - LANES)

    def part(self, begin: Any, number: Any) -> Any:
        """Return which partial is a row's n-th."""
        return part_of(begin + number, number > 0) if self.by_token else begin + number

    def heads_of(self, begin: Any) -> list[Any]:
        """Return the heads whose numbers a vector holds: one, or two of 64 columns."""
        first = lax.div(begin, jnp.int32(self.columns))
        return [first + n for n in range(max(1, LANES // self.columns))]

    def place(self, token: Any, head: Any) -> tuple[Any, Any, Any]:
        """Return the group of heads, the block of query tokens and the row of the product of a row's token."""
        group, block = jnp.int32(self.group), jnp.int32(self.block)
        return lax.div(head, group), lax.div(token, block), lax.rem(token, block) * self.group + lax.rem(head, group)

    def offsets(self, token: Any, begin: Any, blocks: int, height: int) -> list[Any]:
        """Return where a partial holds a vector; two places if its halves are not adjacent there.

        The second place is that of the whole vector of which the second half is meant.
        """
        if self.by_token:
            return [token * self.length + begin]
        places = [self.place(token, head) for head in self.heads_of(begin)]
        rows = [(group * blocks + block) * height + row for group, block, row in places]
        return [
            row * self.columns + lax.rem(begin, jnp.int32(self.columns)) - n * (LANES // 2)
            for n, row in enumerate(rows)
        ]


def fill(shape: Combine, partials: Partials, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Change in place the tokens of combined rows in out [T, H * R] and lse [S, K, Q / Q', M], and blank padding."""

    def body(out: Any, lse: Any, *read: Any) -> None:
        _body(shape, out, lse, *read)

    changed = compat.in_place(
        body,
        changed=(out, lse),
        read=_flat(partials),
        grid=_grid(shape, partials),
        name="combine",
        interpret=shape.interpret,
        fast_math=True,
    )
    return changed[0], changed[1]


def make(shape: Combine, partials: Partials, tokens: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return out [T, H * R] of `dtype` and lse [S, K, Q / Q', M] float32, natural log, arbitrary for other rows."""

    def body(*refs: Any) -> None:
        _body(shape, *refs[-2:], *refs[:-2])

    run = compat.kernel(
        body,
        out=(
            jax.ShapeDtypeStruct((tokens, shape.length), dtype),
            jax.ShapeDtypeStruct((len(partials.starts), *partials.weight.shape[1:]), jnp.float32),
        ),
        scratch=(),
        grid=_grid(shape, partials),
        threads=("warpgroup", 1),
        interpret=shape.interpret,
    )
    out, lse = run(*_flat(partials))
    return out, lse


def _grid(shape: Combine, partials: Partials) -> list[tuple[str, int]]:
    most = partials.weight.shape[2] * shape.block
    return [("row", len(partials.starts)), ("token", most), ("group", shape.groups)]


def _flat(partials: Partials) -> tuple[jax.Array, ...]:
    return partials.mixed.reshape(partials.weight.shape[0], -1), *partials[1:]


def _body(
    shape: Combine,
    out: Any,  # [T, H * R]
    lse: Any,  # [S, K, Q / Q', M]
    mixed: Any,  # [parts, Q * H * R], or [parts, K * Q / Q' * M * R]
    weight: Any,
    begins: Any,
    counts: Any,
    starts: Any,
    lengths: Any,
    tokens: Any,
) -> None:
    row, token, group = (lax.axis_index(name) for name in ("row", "token", "group"))
    _, _, blocks, height = weight.shape
    first = [shape.begin(group, n) for n in range(shape.together)]
    begin, count = begins[row], counts[row]
    spread = partial(_spread, interpret=shape.interpret)

    def step(turn: Any, carry: list[_Sum]) -> list[_Sum]:
        added = []
        parts = [turn * AHEAD + n for n in range(AHEAD)]
        here = [shape.part(begin, jnp.minimum(p, count - 1)) for p in parts]
        for at, old in zip(first, carry, strict=True):
            places = [shape.place(token, head) for head in shape.heads_of(at)]
            offsets = shape.offsets(token, at, blocks, height)
            vectors = [spread([mixed[p, pl.ds(offset, LANES)] for offset in offsets]) for p in here]
            # Below any weight, so that a missing partial adds nothing even to an empty sum.
            weights = [
                [jnp.where(n < count, weight[(p, *place)], 2 * MASKED) for place in places]
                for n, p in zip(parts, here, strict=True)
            ]
            added.append(old.add(vectors, weights, spread))
        return added

    @pl.when((count > 0) & (token < lengths[row]))
    def _sum() -> None:
        start = [_Sum.zero(len(shape.heads_of(at))) for at in first]
        done = lax.fori_loop(0, lax.div(count + (AHEAD - 1), jnp.int32(AHEAD)), step, start)
        for at, total in zip(first, done, strict=True):
            safe = [jnp.maximum(sums, 1e-30) for sums in total.totals]
            vector = total.mixed * spread([1.0 / sums for sums in safe])
            out[starts[row] + token, pl.ds(at, LANES)] = vector.astype(out.dtype)
            for head, peak, sums in zip(shape.heads_of(at), total.peaks, safe, strict=True):

                @pl.when(head * shape.columns >= at)  # one vector holds the first number of a head
                def _tell(head: Any = head, peak: Any = peak, sums: Any = sums) -> None:
                    lse[(row, *shape.place(token, head))] = (peak + jnp.log2(sums)) * math.log(2.0)

    rows, most = lax.axis_size("row"), lax.axis_size("token")
    blank = tokens[0] + row * most + token

    def clear(turn: Any, _: Any) -> Any:
        for at in first:
            out[blank + turn * (rows * most), pl.ds(at, LANES)] = jnp.zeros((LANES,), out.dtype)
        return _

    turns = lax.div(jnp.maximum(out.shape[0] - blank + (rows * most - 1), 0), jnp.int32(rows * most))
    lax.fori_loop(0, turns, clear, jnp.int32(0))


class _Sum(NamedTuple):
    """The running sum of one vector: by head the maximum weight and the sum of weights, and the weighted sum."""

    mixed: jax.Array  # [LANES]
    peaks: list[Any]
    totals: list[Any]

    @classmethod
    def zero(cls, heads: int) -> _Sum:
        return cls(jnp.zeros((LANES,), jnp.float32), [jnp.float32(MASKED)] * heads, [jnp.float32(0.0)] * heads)

    def add(self, vectors: list[jax.Array], weights: list[list[Any]], spread: Callable[[list[Any]], Any]) -> _Sum:
        """Add several partials, with one weight per head of each."""
        tops, fades, totals, shares = [], [], [], []
        for old, total, *new in zip(self.peaks, self.totals, *weights, strict=True):
            top = reduce(jnp.maximum, new, old)
            fade, mine = jnp.exp2(old - top), [jnp.exp2(each - top) for each in new]
            tops.append(top)
            fades.append(fade)
            totals.append(sum(mine, total * fade))
            shares.append(mine)
        mixed = self.mixed * spread(fades)
        for vector, each in zip(vectors, zip(*shares, strict=True), strict=True):
            mixed = mixed + vector * spread(list(each))
        return _Sum(mixed, tops, totals)


def _spread(values: list[Any], interpret: Interpret) -> Any:
    """Give each half of a vector its value, or that half of a vector; all of it if there is one value."""
    if len(values) == 1:
        return values[0]
    # The layout is said because the compiler's search would try others first, thousands of times.
    lane = iota((LANES,), 0, plgpu.Layout.WG_STRIDED((LANES,), 1), interpret)
    first, second = (jnp.broadcast_to(value, lane.shape) for value in values)
    return jnp.where(lane < LANES // 2, first, second)
