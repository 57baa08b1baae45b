"""The worklist of prefill attention: every row longer than decode takes, cut into tiles of query tokens.

A tile is some consecutive tokens of one row; what it costs is the keys that it sees. Tiles lie in descending order of
that cost, so that blocks which take them in turn, or whenever they are free, end together. Nothing here depends on
heads: the kernel does every tile once for each block of heads.

T tokens, S rows, P pages per row, I tiles that there is room for, in the worst case of T and S.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.layout import Ragged

ROW, BEGIN, TOKENS, POSITION = range(4)  # columns of PrefillWork.tiles


class PrefillWork(NamedTuple):
    """What `paged_prefill` runs through. Unused tiles come last and have 0 tokens."""

    tiles: (
        jax.Array
    )  # [I, 4] int32: row; first token in [T]; how many, all of the row; position of the first in the row
    used: jax.Array  # [1] int32, how many tiles are
    place: jax.Array  # [T] int32, tile * tokens of a tile + offset within it; -1 for tokens of no tile
    table: jax.Array  # [S, P'] int32, the rows' page ids, P' so many that whole tiles of keys may be read


def most_tiles(tokens: int, rows: int, *, tile: int, above: int) -> int:
    """I: how many tiles of `tile` tokens T tokens in S rows can need, when only rows of more than `above` have any."""
    last = min(rows, tokens // (above + 1))  # rows that may end in a tile which is not full
    return max(1, (tokens + last * (tile - 1)) // tile)


def plan_prefill(
    ragged: Ragged,
    *,
    page: int,  # B
    tile: int,  # tokens of a tile
    keys: int,  # keys that are read together; a multiple or a divisor of the page
    above: int,  # rows of this many tokens or fewer are decode's
    window: int | None = None,  # keys that a token sees, its own included
) -> PrefillWork:
    """Each token of a row longer than `above` in exactly one tile; those of other rows, and padding, in none."""
    if keys % page and page % keys:
        raise ValueError(f"{keys=} must be a multiple or a divisor of {page=}")
    if min(page, tile, keys) < 1 or above < 0 or (window is not None and window < 1):
        raise ValueError(f"{page=}, {tile=}, {keys=} and {window=} must be positive, {above=} not negative")
    rows = ragged.lengths.shape[0]
    mine = (ragged.lengths > above) & (ragged.contexts > 0)  # [S]
    lengths = jnp.where(mine, ragged.lengths, 0)
    needed = (lengths + tile - 1) // tile
    ends = jnp.cumsum(needed)

    item = jnp.arange(most_tiles(ragged.rows.shape[0], rows, tile=tile, above=above), dtype=jnp.int32)
    used = item < ends[-1]
    # Compared all with all: one small fused program, where a binary search is a loop of many.
    row = jnp.searchsorted(ends, item, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, rows - 1)
    first = (item - (ends - needed)[row]) * tile  # within the row
    tokens = jnp.where(used, jnp.minimum(lengths[row] - first, tile), 0)
    position = (ragged.contexts - ragged.lengths)[row] + first
    lowest = 0 if window is None else jnp.maximum(position - window + 1, 0)
    rank = _rank(jnp.where(used, position + tokens - lowest, -1))

    tiles = jnp.stack([row, ragged.starts[row] + first, tokens, position], axis=1)  # [I, 4]
    tiles = jnp.zeros_like(tiles).at[rank].set(jnp.where(used[:, None], tiles, 0), unique_indices=True)

    owner = jnp.minimum(ragged.rows, rows - 1)  # [T]
    within = jnp.arange(len(owner), dtype=jnp.int32) - ragged.starts[owner]
    covered = (ragged.rows < rows) & mine[owner]
    home = jnp.where(covered, (ends - needed)[owner] + within // tile, 0)
    return PrefillWork(
        tiles=tiles,
        used=ends[-1:].astype(jnp.int32),
        place=jnp.where(covered, rank[home] * tile + within % tile, -1),
        table=jnp.pad(
            ragged.block_tables, ((0, 0), (0, -ragged.block_tables.shape[1] % max(1, keys // page))), mode="edge"
        ),
    )


def _rank(cost: jax.Array) -> jax.Array:
    """Where each would stand if sorted, the highest first and equals in their order. All with all, as above."""
    order = jnp.arange(len(cost))
    before = (cost[None] > cost[:, None]) | ((cost[None] == cost[:, None]) & (order[None] < order[:, None]))
    return jnp.sum(before, axis=1, dtype=jnp.int32)
