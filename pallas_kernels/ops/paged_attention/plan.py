"""Plan decode and prefill attention once per step, in plain jnp; all layers of the step share the work lists.

Decode: a worker is one block of the kernel (for each kv head; all heads follow the same plan). Rows
are laid on a line one after another; a row is as long as the number of its key tiles, plus `extra`
units for its fixed cost. The line is cut into equal shares, one per worker. This balances the
workers for any mix of contexts: there is no partial last wave of blocks, short rows are not split
needlessly, and a row longer than a share is split over neighboring workers, which each write a
partial result. The part of a row that one worker computes is an *item*; there are at most workers +
S items. Only items of split rows have partial results, at most two a worker: of the row that it
continues, and of the row that it begins and the next worker continues.

Prefill: a tile is a run of consecutive tokens of one row, and its cost is the number of keys it
sees. Tiles are sorted by descending cost, so that blocks that take them in turn, or as they become
free, finish together. The plan does not depend on heads: the kernel computes every tile once for
each block of heads.

Letters: T tokens, S rows, P pages per row, I items or tiles: the static maximum for T and S.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.layout import Ragged


class DecodeWork(NamedTuple):
    """The work list of `paged_decode`; items and workers in the order of the line."""

    row: jax.Array  # [I] int32, row of the item; 0 if unused
    first: jax.Array  # [I] int32, its first key tile
    tiles: jax.Array  # [I] int32, its number of key tiles; 0 if unused
    cuts: jax.Array  # [workers + 1] int32: worker w computes items cuts[w] to cuts[w + 1] - 1
    begins: jax.Array  # [S] int32, first item of a row
    splits: jax.Array  # [S] int32, its number of items; 0 for a row that decode does not compute
    part: jax.Array  # [I] int32, number of the item's partial result, see `part_of`; -1 if it is its row's only item
    worker: jax.Array  # [S] int32, first worker of a row
    tokens: jax.Array  # [1] int32, tokens of the step; the others are padding
    table: jax.Array  # [S, P'] int32, page ids of the rows, padded to whole tiles of pages

    @property
    def workers(self) -> int:
        return self.cuts.shape[0] - 1

    @property
    def most_parts(self) -> int:
        """The maximum number of partial results."""
        return 2 * self.workers


def part_of(worker: jax.Array, later: jax.Array) -> jax.Array:
    """Return the number of the partial result of a split row's item; `later`: its row begins in an earlier worker."""
    return 2 * worker + jnp.where(later, 0, 1)


def plan_decode(
    ragged: Ragged,
    *,
    page: int,  # B
    queries: int,  # maximum tokens of a decode row
    tile: int,  # tokens of keys read together; a multiple or a divisor of the page
    workers: int,
    window: int | None = None,  # number of keys that a token sees, its own included
    extra: int = 1,
) -> DecodeWork:
    """Share out the key tiles that tokens of decode rows see; longer rows are left to prefill."""
    if tile % page and page % tile:
        raise ValueError(f"{tile=} must be a multiple or a divisor of {page=}")
    if min(page, queries, tile, workers) < 1 or extra < 0 or (window is not None and window < 1):
        raise ValueError(
            f"{page=}, {queries=}, {tile=}, {workers=} and {window=} must be positive, {extra=} not negative"
        )
    mine = (ragged.lengths >= 1) & (ragged.lengths <= queries) & (ragged.contexts > 0)  # [S]
    seen = jnp.zeros_like(ragged.contexts) if window is None else ragged.contexts - ragged.lengths + 1 - window
    base = jnp.maximum(seen, 0) // tile  # [S], first tile within the window of the row's first token
    tiles = jnp.where(mine, (ragged.contexts + tile - 1) // tile - base, 0)

    units = jnp.where(tiles > 0, tiles + extra, 0)
    unit_ends, tile_ends = jnp.cumsum(units), jnp.cumsum(tiles)
    # Rounded up, so that only the last workers can have less than a share.
    share = jnp.maximum((unit_ends[-1] + workers - 1) // workers, 1)
    at = jnp.arange(workers + 1, dtype=jnp.int32) * share
    under = jnp.minimum(_rank_rows(unit_ends, at), len(units) - 1)  # [workers + 1], the row that each cut falls in
    inside = jnp.clip(at - (unit_ends - units)[under] - extra, 0, tiles[under])
    cuts = (tile_ends - tiles)[under] + inside  # [workers + 1], in tiles, from 0 to their total

    begin, end = (
        _rank_rows(cuts, tile_ends - tiles) - 1,
        _rank_rows(cuts, tile_ends - 1) - 1,
    )  # [S], first and last worker of each row
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
        part=jnp.where(used & (splits[row] > 1), part_of(worker, item > begins[row]), -1),
        worker=begin,
        tokens=jnp.sum(ragged.rows < len(tiles), dtype=jnp.int32)[None],
        table=_whole(ragged.block_tables, max(1, tile // page)),
    )


def _rank_rows(ordered: jax.Array, x: jax.Array, *, before: bool = False) -> jax.Array:
    """Return how many of `ordered` are at most x, or less than x if `before`.

    Compares all pairs: one small fused program.
    """
    side = "left" if before else "right"
    return jnp.searchsorted(ordered, x, side=side, method="compare_all").astype(jnp.int32)


def _whole(table: jax.Array, pages: int) -> jax.Array:
    """Pad the table [S, P] to be readable `pages` entries at a time.

    Padding repeats the last entry, so a row whose unused entries name its own pages reads no other
    page.
    """
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)), mode="edge")


ROW, BEGIN, TOKENS, POSITION = range(4)  # columns of PrefillWork.tiles


class PrefillWork(NamedTuple):
    """The work list of `paged_prefill`; unused tiles come last and have 0 tokens."""

    tiles: jax.Array  # [I, 4] int32: row, first token in [T], number of tokens, position of the first token in the row
    used: jax.Array  # [1] int32, number of tiles in use
    place: jax.Array  # [T] int32, tile * tokens per tile + offset in the tile; -1 for tokens of no tile
    table: jax.Array  # [S, P'] int32, page ids of the rows, padded to whole tiles of keys


def most_tiles(tokens: int, rows: int, *, tile: int, above: int) -> int:
    """Return I, the maximum number of tiles of T tokens in S rows, if only rows of more than `above` have any."""
    last = min(rows, tokens // (above + 1))  # maximum rows with a partial last tile
    return max(1, (tokens + last * (tile - 1)) // tile)


def plan_prefill(
    ragged: Ragged,
    *,
    page: int,  # B
    tile: int,  # tokens of a tile
    keys: int,  # tokens of keys read together; a multiple or a divisor of the page
    above: int,  # maximum tokens of a decode row
    window: int | None = None,  # number of keys that a token sees, its own included
) -> PrefillWork:
    """Cut rows of more than `above` tokens into tiles; other rows and padding are in no tile."""
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
    # compare_all is one small fused program; a binary search is a loop of many.
    row = jnp.searchsorted(ends, item, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, rows - 1)
    first = (item - (ends - needed)[row]) * tile  # offset in the row
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
    """Return each tile's place in a stable descending sort, by comparing all pairs."""
    order = jnp.arange(len(cost))
    before = (cost[None] > cost[:, None]) | ((cost[None] == cost[:, None]) & (order[None] < order[:, None]))
    return jnp.sum(before, axis=1, dtype=jnp.int32)
