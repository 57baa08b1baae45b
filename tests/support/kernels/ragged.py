"""Synthetic steps for tests: rows of (length, context) over shuffled pages.

Tables are as the engine makes them (inputs.SlotTable): entries after a row's own pages repeat its
last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pallas_kernels.layout import Ragged

Array = npt.NDArray[np.int32]


def make(
    rows: Sequence[tuple[int, int]],  # (tokens in this step, context after its write)
    tables: Sequence[Sequence[int]],  # pages of each row
    *,
    page: int,
    pool: int,
    tokens: int | None = None,  # padded size
    padded_rows: int | None = None,
    width: int | None = None,
) -> Ragged:
    size, count = sum(length for length, _ in rows), len(rows)
    total, slots = tokens or size, padded_rows or count
    table = np.zeros((slots, width or max(1, *(len(pages) for pages in tables))), np.int32)
    positions, owner = np.zeros(total, np.int32), np.full(total, slots, np.int32)
    write = np.full(total, pool * page, np.int32)
    starts, lengths, contexts = (np.zeros(slots, np.int32) for _ in range(3))
    at = 0
    for row, ((length, context), pages) in enumerate(zip(rows, tables, strict=True)):
        table[row, : len(pages)] = pages
        table[row, len(pages) :] = pages[-1] if pages else 0
        here = np.arange(context - length, context, dtype=np.int32)
        span = slice(at, at + length)
        positions[span], owner[span] = here, row
        write[span] = table[row][here // page] * page + here % page
        starts[row], lengths[row], contexts[row] = at, length, context
        at += length
    return Ragged(positions, owner, write, starts, lengths, contexts, table)


def deal(rows: Sequence[tuple[int, int]], *, page: int, pool: int, seed: int = 0) -> list[list[int]]:
    """Deal disjoint random pages to each row; never page 0, which the tables of unused rows name."""
    free = list(1 + np.random.default_rng(seed).permutation(pool - 1))
    return [[int(free.pop()) for _ in range(-(-context // page))] for _, context in rows]


def poisoned(pool: Any, tables: Sequence[Sequence[int]]) -> jax.Array:
    """Return a pool [N, ...] with NaN in the pages that no row has; in int8 with -128, which no value is stored as."""
    spoiled = np.array(pool)
    unused = np.setdiff1d(np.arange(len(spoiled)), list(chain(*tables)))
    spoiled[unused] = -128 if spoiled.dtype == np.int8 else np.nan
    return jnp.asarray(spoiled)
