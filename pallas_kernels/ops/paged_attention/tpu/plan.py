"""What a TPU kernel works through: one item is a few neighbouring tokens of one row. Planned once a step.

A TPU core runs its items one after the other and fetches for the next while it computes, so nothing is split over
keys and nothing is balanced; the plan only picks rows by length and cuts them into pieces of at most Q tokens.

Letters: T tokens, S rows, I items (a static bound), Q tokens of an item.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.layout import Ragged


class Work(NamedTuple):
    """Items come in order of their tokens; those from `items` on are padding and never run."""

    items: jax.Array  # [1] int32, how many there are
    rows: jax.Array  # [I] int32, row of the item
    firsts: jax.Array  # [I] int32, position of its first token
    ends: jax.Array  # [I] int32, one beyond the position of its last token
    tokens: jax.Array  # [I] int32, its first token in [T]
    slots: jax.Array  # [T] int32, where each token is computed: item * Q + offset; I * Q where it is not


def plan_decode(ragged: Ragged, *, queries: int) -> Work:
    """Rows of 1 .. `queries` tokens in this step, an item each; I = S."""
    return _cut(ragged, queries, 1, queries, ragged.starts.shape[0])


def plan_prefill(ragged: Ragged, *, queries: int, above: int) -> Work:
    """Rows of more than `above` tokens in this step, in items of `queries` tokens, the last of a row maybe shorter."""
    tokens, rows = ragged.positions.shape[0], ragged.starts.shape[0]
    return _cut(ragged, queries, above + 1, tokens, most_items(tokens, rows, queries=queries, above=above))


def most_items(tokens: int, rows: int, *, queries: int, above: int) -> int:
    """I of `plan_prefill`: full items there are T / Q at most, and one more for what remains of each row."""
    return max(1, tokens // queries + min(rows, tokens // (above + 1)))


def _cut(ragged: Ragged, queries: int, least: int, most: int, items: int) -> Work:
    rows = ragged.starts.shape[0]
    mine = (ragged.lengths >= least) & (ragged.lengths <= most)  # [S]
    pieces = jnp.where(mine, (ragged.lengths + queries - 1) // queries, 0)
    bounds = jnp.cumsum(pieces)  # [S], one beyond each row's last item
    item = jnp.arange(items, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(bounds, item, side="right"), rows - 1).astype(jnp.int32)  # [I]
    offset = (item - (bounds - pieces)[row]) * queries  # of the item in its row
    # Padding items may lie beyond their row, which then is the last one: nothing of them is used.
    firsts = ragged.contexts[row] - ragged.lengths[row] + offset
    ends = jnp.minimum(firsts + queries, ragged.contexts[row])
    owner = jnp.minimum(ragged.rows, rows - 1)  # [T]
    inside = jnp.arange(ragged.rows.shape[0], dtype=jnp.int32) - ragged.starts[owner]
    slots = (bounds - pieces)[owner] * queries + inside  # pieces of a row follow one another: no division
    taken = (ragged.rows < rows) & mine[owner]
    return Work(
        bounds[-1:].astype(jnp.int32),
        row,
        firsts.astype(jnp.int32),
        ends.astype(jnp.int32),
        (ragged.starts[row] + offset).astype(jnp.int32),
        jnp.where(taken, slots, items * queries).astype(jnp.int32),
    )
