"""The worklist of decode attention: all tiles of keys on one line, cut into equal shares, one for each worker.

A worker is one block of the kernel (for every kv head again: all heads go by the same plan). Rows lie on the line one
after another, each as many units long as it has tiles to read, and `extra` units longer for what a row costs beside its
tiles. Equal shares of that line keep every worker busy to the end, whatever the mix of contexts: no wave of blocks is
left half empty, a short row is not split, and a row longer than a share is shared by neighbours, who each write a
partial result. What one worker does in one row is an *item*; there are at most workers + S of them.

S rows, P pages per row, I = workers + S items.
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
    under = jnp.minimum(_rank(unit_ends, at), len(units) - 1)  # [workers + 1], the row in which a cut falls
    inside = jnp.clip(at - (unit_ends - units)[under] - extra, 0, tiles[under])
    cuts = (tile_ends - tiles)[under] + inside  # [workers + 1], in tiles; from 0 to their number

    begin, end = _rank(cuts, tile_ends - tiles) - 1, _rank(cuts, tile_ends - 1) - 1  # [S], a row's first, last worker
    splits = jnp.where(tiles > 0, end - begin + 1, 0)
    item_ends = jnp.cumsum(splits)
    begins = item_ends - splits

    item = jnp.arange(workers + len(tiles), dtype=jnp.int32)
    used = item < item_ends[-1]
    row = jnp.where(used, _rank(item_ends, item), 0)
    worker = jnp.where(used, begin[row] + item - begins[row], workers)
    low = jnp.maximum(cuts[jnp.minimum(worker, workers)], (tile_ends - tiles)[row])
    high = jnp.minimum(cuts[jnp.minimum(worker + 1, workers)], tile_ends[row])
    return DecodeWork(
        row=row,
        first=jnp.where(used, low - (tile_ends - tiles)[row] + base[row], 0),
        tiles=jnp.where(used, high - low, 0),
        cuts=_rank(worker, jnp.arange(workers + 1, dtype=jnp.int32), before=True),
        begins=begins,
        splits=splits,
        table=_whole(ragged.block_tables, max(1, tile // page)),
    )


def _rank(ordered: jax.Array, x: jax.Array, *, before: bool = False) -> jax.Array:
    """How many of `ordered` are at most x, or `before` less than x. Compared all with all: one small fused program."""
    side = "left" if before else "right"
    return jnp.searchsorted(ordered, x, side=side, method="compare_all").astype(jnp.int32)


def _whole(table: jax.Array, pages: int) -> jax.Array:
    """The table [S, P] wide enough to be read `pages` at a time; what is added names the page before it, so that a row
    whose unused entries name its own pages reads no other."""
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)), mode="edge")
