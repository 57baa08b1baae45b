"""The arrays that describe one step to the kernels. CONTRIBUTING lists the shape letters.

T tokens in the step, S rows, P pages per row, N pages in the pool, B page size, K kv heads, D head
dim. A pool of one layer is a pair k, v of [N, B, K, D]; pages of one request need not be
contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax

MASKED = -1e30  # score of a masked key; finite, because exp(-inf + inf) of a fully masked tile is NaN


class Scales(NamedTuple):
    """Scales of quantized pools (fp8, int8), per kv head: a key is stored as key / scale."""

    k: jax.Array  # [K] float32
    v: jax.Array  # [K] float32


class SharedPrefixes(NamedTuple):
    """Groups of rows that begin with the same pages. G groups; those without a row share no page."""

    group: jax.Array  # [S] int32, 1 + the row's group, or 0: none
    row: jax.Array  # [G] int32, a row of the group: its block table begins with the shared pages
    pages: jax.Array  # [G] int32, shared pages: all full, and before every token of this step
    tokens: jax.Array  # [G] int32, pages * B


class Ragged(NamedTuple):
    """The rows of a step, of different lengths, flattened: padding tokens come last, padding rows have length 0."""

    positions: jax.Array  # [T] int32, position of each token in its request (0 for padding)
    rows: jax.Array  # [T] int32, row of each token (S for padding)
    write: jax.Array  # [T] int32, page * B + offset to write the token's KV to (N * B, out of range, for padding)
    starts: jax.Array  # [S] int32, first token of the row in [T]
    lengths: jax.Array  # [S] int32, tokens of the row in this step
    contexts: jax.Array  # [S] int32, tokens of the row in the cache after this step's write (0 for padding)
    block_tables: jax.Array  # [S, P] int32, page ids in order; 0 where unused
    shared: SharedPrefixes | None = None  # for backends that read shared pages once; others may ignore it
    slots: jax.Array | None = None  # [S] int32, where layers keep a state of the row; out of range for padding rows

    @classmethod
    def of(cls, arrays: Iterable[jax.Array]) -> Ragged:
        """Return a step without shared prefixes and slots from its ARRAYS arrays."""
        return cls._make((*arrays, None, None))


ARRAYS = len(Ragged._fields) - len(Ragged._field_defaults)  # of a step without shared prefixes and slots
