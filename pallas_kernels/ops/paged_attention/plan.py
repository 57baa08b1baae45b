"""Worklists of decode and prefill attention, made once a step in plain jnp and shared by all layers.

A worker is one block of the kernel (for every kv head again: all heads go by the same plan). Rows lie on the line one
after another, each as many units long as it has tiles to read, and `extra` units longer for what a row costs beside its
tiles. Equal shares of that line keep every worker busy to the end, whatever the mix of contexts: no wave of blocks is
left half empty, a short row is not split, and a row longer than a share is shared by neighbours, who each write a
partial result. What one worker does in one row is an *item*; there are at most workers + S of them.

S rows, P pages per row, I = workers + S items.

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


class DecodeWork(NamedTuple):
    """What `paged_decode` runs through; items and workers in the order of the line."""

    row: jax.Array  # [I] int32, the item's row; 0 where the item is unused
    first: jax.Array  # [I] int32, its first tile
    tiles: jax.Array  # [I] int32, how many; 0 where unused
    cuts: jax.Array  # [workers + 1] int32: worker w does the items from cuts[w] up to, not including, cuts[w + 1]
    begins: jax.Array  # [S] int32, first item of a row
    splits: jax.Array  # [S] int32, how many items it has; 0 for a row that decode does not compute
    table: jax.Array  # [S, P'] int32, the rows' page ids, P' so many that whole tiles of pages may be read

    @property
    def workers(self) -> int:
        return self.cuts.shape[0] - 1


def plan_decode(
    ragged: Ragged,
    *,
    page: int,  # B
    queries: int,  # rows of 1 to so many tokens are decode's
    tile: int,  # tokens of keys that are read together; a multiple or a divisor of the page
    workers: int,
    window: int | None = None,  # keys that a token sees, its own included
    extra: int = 1,
) -> DecodeWork:
    """Share out all tiles that hold a key some token of a decode row sees; every other row is left to prefill."""
    if tile % page and page % tile:
        raise ValueError(f"{tile=} must be a multiple or a divisor of {page=}")
    if min(page, queries, tile, workers) < 1 or extra < 0 or (window is not None and window < 1):
        raise ValueError(
            f"{page=}, {queries=}, {tile=}, {workers=} and {window=} must be positive, {extra=} not negative"
        )
    mine = (ragged.lengths >= 1) & (ragged.lengths <= queries) & (ragged.contexts > 0)  # [S]
    seen = jnp.zeros_like(ragged.contexts) if window is None else ragged.contexts - ragged.lengths + 1 - window
    base = jnp.maximum(seen, 0) // tile  # [S], the first tile within the window of the row's first token
    tiles = jnp.where(mine, (ragged.contexts + tile - 1) // tile - base, 0)

    units = jnp.where(tiles > 0, tiles + extra, 0)
    unit_ends, tile_ends = jnp.cumsum(units), jnp.cumsum(tiles)
    # Rounded up, so that every worker but the last ones has exactly a share, and none in the middle of a row has none.
    share = jnp.maximum((unit_ends[-1] + workers - 1) // workers, 1)
    at = jnp.arange(workers + 1, dtype=jnp.int32) * share
    under = jnp.minimum(_rank_rows(unit_ends, at), len(units) - 1)  # [workers + 1], the row in which a cut falls
    inside = jnp.clip(at - (unit_ends - units)[under] - extra, 0, tiles[under])
    cuts = (tile_ends - tiles)[under] + inside  # [workers + 1], in tiles; from 0 to their number

    begin, end = (
        _rank_rows(cuts, tile_ends - tiles) - 1,
        _rank_rows(cuts, tile_ends - 1) - 1,
    )  # [S], a row's first, last worker
    splits = jnp.where(tiles > 0, end - begin + 1, 0)
    item_ends = jnp.cumsum(splits)
    begins = item_ends - splits

    item = jnp.arange(workers + len(tiles), dtype=jnp.int32)
    used = item < item_ends[-1]
    row = jnp.where(used, _rank_rows(item_ends, item), 0)
    worker = jnp.where(used, begin[row] + item - begins[row], workers)
    low = jnp.maximum(cuts[jnp.minimum(worker, workers)], (tile_ends - tiles)[row])
    high = jnp.minimum(cuts[jnp.minimum(worker + 1, workers)], tile_ends[row])
    return DecodeWork(
        row=row,
        first=jnp.where(used, low - (tile_ends - tiles)[row] + base[row], 0),
        tiles=jnp.where(used, high - low, 0),
        cuts=_rank_rows(worker, jnp.arange(workers + 1, dtype=jnp.int32), before=True),
        begins=begins,
        splits=splits,
        table=_whole(ragged.block_tables, max(1, tile // page)),
    )


def _rank_rows(ordered: jax.Array, x: jax.Array, *, before: bool = False) -> jax.Array:
    """How many of `ordered` are at most x, or `before` less than x. Compared all with all: one small fused program."""
    side = "left" if before else "right"
    return jnp.searchsorted(ordered, x, side=side, method="compare_all").astype(jnp.int32)


def _whole(table: jax.Array, pages: int) -> jax.Array:
    """The table [S, P] wide enough to be read `pages` at a time; what is added names the page before it, so that a row
    whose unused entries name its own pages reads no other."""
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)), mode="edge")


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
    rank = _rank_tiles(jnp.where(used, position + tokens - lowest, -1))

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


def _rank_tiles(cost: jax.Array) -> jax.Array:
    """Where each would stand if sorted, the highest first and equals in their order. All with all, as above."""
    order = jnp.arange(len(cost))
    before = (cost[None] > cost[:, None]) | ((cost[None] == cost[:, None]) & (order[None] < order[:, None]))
    return jnp.sum(before, axis=1, dtype=jnp.int32)
