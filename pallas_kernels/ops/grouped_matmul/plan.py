"""Plan the products of a mixture of experts: rows sorted by expert, and a list of tiles of them.

A plan is made in plain jnp once per layer, because each layer has its own router; the layer's two
products share it. Sizes are static; only the first `used` tiles count.

Letters: Q pairs of a token and a chosen expert, X experts, R rows, I tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

PAIRWISE = 2048  # up to this many pairs, comparing all with all is faster than the several launches of a sort


class Groups(NamedTuple):
    """Rows sorted by expert, each group starting at a multiple of `align`, and tiles of them in row order.

    A tile holds rows of one expert. Reading `tile` rows from its first row stays within R.
    """

    place: jax.Array  # [Q] int32, row of each pair; R if no expert of this shard computes it
    source: jax.Array  # [R] int32, pair of each row; any pair for padding rows
    owner: jax.Array  # [R] int32, expert of each row; any expert for padding rows
    starts: jax.Array  # [X] int32, first row of each expert
    sizes: jax.Array  # [X] int32, rows of each expert
    expert: jax.Array  # [I] int32, expert of each tile
    begin: jax.Array  # [I] int32, first row of each tile
    length: jax.Array  # [I] int32, rows of each tile: 1 to `tile`
    used: jax.Array  # [1] int32, number of tiles that count


def plan_experts(chosen: jax.Array, *, experts: int, tile: int, align: int = 1) -> Groups:
    """Plan the work for `chosen` [Q] int32, the expert of each pair; out-of-range experts are not computed.

    Raises ValueError if `tile` is not a positive multiple of `align`.
    """
    if min(tile, align) < 1 or tile % align:
        raise ValueError(f"{tile=} must be a positive multiple of {align=}")
    pairs, rows = len(chosen), rows_of(len(chosen), experts, tile, align)
    here = (chosen >= 0) & (chosen < experts)
    mine = jnp.where(here, chosen, experts).astype(jnp.int32)
    index = jnp.arange(experts, dtype=jnp.int32)
    sizes = jnp.sum(mine[:, None] == index[None], axis=0, dtype=jnp.int32)
    starts = _before(-(-sizes // align) * align)
    place = jnp.where(here, starts[jnp.minimum(mine, experts - 1)] + _rank(mine, sizes), rows)
    source = (
        jnp.zeros(rows, jnp.int32).at[place].set(jnp.arange(pairs, dtype=jnp.int32), mode="drop", unique_indices=True)
    )
    tiles = -(-sizes // tile)
    first = _before(tiles)  # first tile of each expert
    item = jnp.arange(tiles_of(pairs, experts, tile), dtype=jnp.int32)
    expert = jnp.clip(jnp.sum(first[None] <= item[:, None], axis=1, dtype=jnp.int32) - 1, 0, experts - 1)
    within = (item - first[expert]) * tile
    # Among experts that start at the same row only the last can have rows.
    row = jnp.arange(rows, dtype=jnp.int32)
    owner = jnp.clip(jnp.sum(starts[None] <= row[:, None], axis=1, dtype=jnp.int32) - 1, 0, experts - 1)
    length = jnp.clip(sizes[expert] - within, 0, tile)
    used = jnp.sum(tiles, dtype=jnp.int32)[None]
    return Groups(place, source, owner, starts, sizes, expert, starts[expert] + within, length, used)


def rows_of(pairs: int, experts: int, tile: int, align: int) -> int:
    """Return R, the rows to allocate."""
    spread = pairs + min(pairs, experts) * (align - 1)
    return -(-spread // align) * align + tile


def tiles_of(pairs: int, experts: int, tile: int) -> int:
    """Return I, the maximum number of tiles."""
    return min(pairs, experts + pairs // tile)


def _before(sizes: jax.Array) -> jax.Array:
    """Return the exclusive prefix sum of sizes [X], as one GPU kernel where a cumulative sum takes several."""
    index = jnp.arange(len(sizes))
    return jnp.sum(jnp.where(index[None] < index[:, None], sizes[None], 0), axis=1, dtype=jnp.int32)


def _rank(mine: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return how many earlier pairs chose the same expert, [Q]."""
    pairs = len(mine)
    if pairs <= PAIRWISE:
        index = jnp.arange(pairs)
        return jnp.sum((mine[None] == mine[:, None]) & (index[None] < index[:, None]), axis=1, dtype=jnp.int32)
    order = jnp.argsort(mine, stable=True)
    sorted_at = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    return sorted_at - _before(sizes)[jnp.minimum(mine, len(sizes) - 1)]
