"""Cut rows into slices of a few query tokens, each a row of its own to a kernel that takes no more.

A slice sees the pages of its row up to its own last token, so a piece of a prompt looks like a
decode row.

Letters: T tokens, S rows, P pages per row, Q maximum tokens of a slice, S' capacity in slices.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.layout import Ragged


def most_slices(tokens: int, rows: int, queries: int) -> int:
    """Return S', the maximum number of slices of Q tokens that T tokens in S rows need."""
    return max(1, min(tokens, (tokens + rows * (queries - 1)) // queries))


def sliced(ragged: Ragged, queries: int) -> Ragged:
    """Regroup the tokens into S' rows of up to Q tokens, in order; unused slices come last and are empty."""
    if queries < 1:
        raise ValueError(f"{queries=} must be positive")
    tokens, rows = ragged.rows.shape[0], ragged.lengths.shape[0]
    needed = (ragged.lengths + queries - 1) // queries  # [S]
    ends = jnp.cumsum(needed)
    item = jnp.arange(most_slices(tokens, rows, queries), dtype=jnp.int32)
    # compare_all is one small fused program; a binary search is a loop of many.
    row = jnp.searchsorted(ends, item, side="right", method="compare_all").astype(jnp.int32)
    used, row = row < rows, jnp.minimum(row, rows - 1)
    first = (item - (ends - needed)[row]) * queries  # offset within the row
    lengths = jnp.where(used, jnp.minimum(ragged.lengths[row] - first, queries), 0)
    owner = jnp.minimum(ragged.rows, rows - 1)  # [T]
    within = jnp.arange(tokens, dtype=jnp.int32) - ragged.starts[owner]
    return ragged._replace(
        rows=jnp.where(ragged.rows < rows, (ends - needed)[owner] + within // queries, len(item)),
        starts=jnp.where(used, ragged.starts[row] + first, 0),
        lengths=lengths,
        contexts=jnp.where(used, (ragged.contexts - ragged.lengths)[row] + first + lengths, 0),
        block_tables=ragged.block_tables[row],
    )
