"""Plan the TPU kernels once per step: an item is a few consecutive tokens of one row.

A TPU core runs its items one after another and prefetches during computation, so nothing is split
over keys or balanced; the plan only selects rows by length and cuts them into items of at most Q
tokens.

Letters: T tokens, S rows, I items (a static bound), Q tokens of an item.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.layout import Ragged


class WorkItems(NamedTuple):
    """Items in the order of their tokens; items after the first `items` are padding and never run."""

    items: jax.Array  # [1] int32, number of items
    rows: jax.Array  # [I] int32, row of the item
    firsts: jax.Array  # [I] int32, position of the item's first token
    ends: jax.Array  # [I] int32, one past the position of its last token
    tokens: jax.Array  # [I] int32, index of its first token in [T]
    slots: jax.Array  # [T] int32, place of each token: item * Q + offset; I * Q if not computed


def plan_decode(ragged: Ragged, *, queries: int) -> WorkItems:
    """Plan rows of 1 to `queries` tokens, one item each; I = S."""
    return _cut(ragged, queries, 1, queries, ragged.starts.shape[0])


def plan_prefill(ragged: Ragged, *, queries: int, above: int) -> WorkItems:
    """Plan rows of more than `above` tokens, in items of `queries` tokens; the last item of a row may be shorter."""
    tokens, rows = ragged.positions.shape[0], ragged.starts.shape[0]
    return _cut(ragged, queries, above + 1, tokens, most_items(tokens, rows, queries=queries, above=above))


def most_items(tokens: int, rows: int, *, queries: int, above: int) -> int:
    """Return I of `plan_prefill`: at most T / Q full items, and one more for the rest of each row."""
    return max(1, tokens // queries + min(rows, tokens // (above + 1)))


def _cut(ragged: Ragged, queries: int, least: int, most: int, items: int) -> WorkItems:
    rows = ragged.starts.shape[0]
    mine = (ragged.lengths >= least) & (ragged.lengths <= most)  # [S]
    pieces = jnp.where(mine, (ragged.lengths + queries - 1) // queries, 0)
    bounds = jnp.cumsum(pieces)  # [S], one past each row's last item
    item = jnp.arange(items, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(bounds, item, side="right"), rows - 1).astype(jnp.int32)  # [I]
    offset = (item - (bounds - pieces)[row]) * queries  # of the item in its row
    # Padding items may lie beyond the last row; their values are unused.
    firsts = ragged.contexts[row] - ragged.lengths[row] + offset
    ends = jnp.minimum(firsts + queries, ragged.contexts[row])
    owner = jnp.minimum(ragged.rows, rows - 1)  # [T]
    inside = jnp.arange(ragged.rows.shape[0], dtype=jnp.int32) - ragged.starts[owner]
    slots = (bounds - pieces)[owner] * queries + inside  # the items of a row are consecutive, so no division is needed
    taken = (ragged.rows < rows) & mine[owner]
    return WorkItems(
        bounds[-1:].astype(jnp.int32),
        row,
        firsts.astype(jnp.int32),
        ends.astype(jnp.int32),
        (ragged.starts[row] + offset).astype(jnp.int32),
        jnp.where(taken, slots, items * queries).astype(jnp.int32),
    )
