"""Moving KV pages between instances: gathered on one mesh, copied device to device, scattered on another.

A parcel is a list of pieces; each piece has one of a few sizes, so that no number of pages compiles anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
import numpy.typing as npt

PIECES = (1, 4, 16, 64)  # pages in a piece
Piece = tuple[jax.Array, ...]  # [L, parts, M, B, K, D] of the model, and of one that drafts for it


@dataclass(frozen=True, slots=True)
class Parcel:
    """KV of `pages` pages in order. Each piece: (pages in it, arrays with M from PIECES)."""

    pages: int
    pieces: tuple[tuple[int, Piece], ...]


def piece_sizes(row_pages: int) -> tuple[int, ...]:
    """Sizes that occur when a row has at most `row_pages` pages."""
    most = next((size for size in PIECES if size >= row_pages), PIECES[-1])
    return tuple(size for size in PIECES if size <= most)


def cut(pages: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
    """Split pages into pieces: (size of the program, its pages). Whole largest ones, then one that holds the rest."""
    pieces, at, largest = [], 0, sizes[-1]
    while len(pages) - at >= largest:
        pieces.append((largest, pages[at : at + largest]))
        at += largest
    if at < len(pages):
        rest = pages[at:]
        pieces.append((next(size for size in sizes if size >= len(rest)), rest))
    return pieces


def padded(pages: Sequence[int], bucket: int, out_of_range: int) -> npt.NDArray[np.int32]:
    """Pages [M] of a parcel's bucket."""
    ids = np.full(bucket, out_of_range, np.int32)
    ids[: len(pages)] = pages
    return ids
