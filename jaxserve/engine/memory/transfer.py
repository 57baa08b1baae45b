"""KV page transfers: gather on one mesh, copy from device to device, scatter on the other.

A KV buffer is a list of pieces. Pieces have a few fixed sizes, so no number of pages causes a
compilation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
import numpy.typing as npt

PIECES = (1, 4, 16, 64)  # pages in a piece
Piece = tuple[jax.Array, ...]  # [L, parts, M, B, K, D] of the model, and of a draft model if there is one


@dataclass(frozen=True, slots=True)
class KVBuffer:
    """The KV of `pages` pages, in order. Each piece: (number of pages, arrays with M from PIECES)."""

    pages: int
    pieces: tuple[tuple[int, Piece], ...]


def piece_sizes(row_pages: int) -> tuple[int, ...]:
    """Return the piece sizes that occur if a row has at most `row_pages` pages."""
    most = next((size for size in PIECES if size >= row_pages), PIECES[-1])
    return tuple(size for size in PIECES if size <= most)


def cut(pages: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
    """Split pages into pieces: (size of the program, its pages).

    Pieces of the largest size come first, then the smallest piece that holds the rest.
    """
    pieces, at, largest = [], 0, sizes[-1]
    while len(pages) - at >= largest:
        pieces.append((largest, pages[at : at + largest]))
        at += largest
    if at < len(pages):
        rest = pages[at:]
        pieces.append((next(size for size in sizes if size >= len(rest)), rest))
    return pieces


def padded(pages: Sequence[int], bucket: int, out_of_range: int) -> npt.NDArray[np.int32]:
    """Pad pages to [bucket] with an id that is out of range."""
    ids = np.full(bucket, out_of_range, np.int32)
    ids[: len(pages)] = pages
    return ids
