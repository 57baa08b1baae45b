"""Who multiplies what in a mixture of experts: rows sorted by expert, and tiles of them as a list of work.

Made by plain jnp once for each layer, as each has a router of its own; its two products share it. Sizes are static:
what is not used lies behind `used`. Letters: Q pairs of a token and an expert that it chose, X experts, R rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

PAIRWISE = 2048  # pairs up to which comparing all with all is quicker than the several launches of a sort


class Groups(NamedTuple):
    """Rows by expert, each group from a multiple of `align` on; I tiles, of which `used` count, in the order of rows.

    A tile is of one expert. Reading `tile` rows from where it begins stays within R.
    """

    place: jax.Array  # [Q] int32, row of each pair; R where no expert computes it
    source: jax.Array  # [R] int32, pair of each row; some pair where a row is nobody's
    owner: jax.Array  # [R] int32, expert of each row; some expert where a row is nobody's
    starts: jax.Array  # [X] int32, first row of each expert
    sizes: jax.Array  # [X] int32, rows of each expert
    expert: jax.Array  # [I] int32, of each tile
    begin: jax.Array  # [I] int32, first row
    length: jax.Array  # [I] int32, rows: 1 to `tile`
    used: jax.Array  # [1] int32


def plan_experts(chosen: jax.Array, *, experts: int, tile: int, align: int = 1) -> Groups:
    """The work for `chosen` [Q] int32, the expert of each pair; those out of range are not computed.

    Raises ValueError where `tile` is not a positive multiple of `align`.
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
    first = _before(tiles)  # tile of each expert
    item = jnp.arange(tiles_of(pairs, experts, tile), dtype=jnp.int32)
    expert = jnp.clip(jnp.sum(first[None] <= item[:, None], axis=1, dtype=jnp.int32) - 1, 0, experts - 1)
    within = (item - first[expert]) * tile
    # Of experts that begin at one row the last has rows, or there is none.
    row = jnp.arange(rows, dtype=jnp.int32)
    owner = jnp.clip(jnp.sum(starts[None] <= row[:, None], axis=1, dtype=jnp.int32) - 1, 0, experts - 1)
    length = jnp.clip(sizes[expert] - within, 0, tile)
    used = jnp.sum(tiles, dtype=jnp.int32)[None]
    return Groups(place, source, owner, starts, sizes, expert, starts[expert] + within, length, used)


def rows_of(pairs: int, experts: int, tile: int, align: int) -> int:
    """R."""
    spread = pairs + min(pairs, experts) * (align - 1)
    return -(-spread // align) * align + tile


def tiles_of(pairs: int, experts: int, tile: int) -> int:
    """I."""
    return min(pairs, experts + pairs // tile)


def _before(sizes: jax.Array) -> jax.Array:
    """The sum of what comes before each, [X]: one kernel on a GPU, where a cumulative sum is several."""
    index = jnp.arange(len(sizes))
    return jnp.sum(jnp.where(index[None] < index[:, None], sizes[None], 0), axis=1, dtype=jnp.int32)


def _rank(mine: jax.Array, sizes: jax.Array) -> jax.Array:
    """How many pairs before each one have its expert, [Q]."""
    pairs = len(mine)
    if pairs <= PAIRWISE:
        index = jnp.arange(pairs)
        return jnp.sum((mine[None] == mine[:, None]) & (index[None] < index[:, None]), axis=1, dtype=jnp.int32)
    order = jnp.argsort(mine, stable=True)
    sorted_at = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    return sorted_at - _before(sizes)[jnp.minimum(mine, len(sizes) - 1)]
