"""Moving KV pages between instances: gathered on one mesh, copied device to device, scattered on another.

A parcel is a list of pieces; each piece has one of a few sizes, so that no number of pages compiles anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

PIECES = (1, 4, 16, 64)  # pages in a piece


@dataclass(frozen=True, slots=True)
class Parcel:
    """KV of `pages` pages in order. Each piece: (pages in it, array [L, parts, M, B, K, D] with M from PIECES)."""

    pages: int
    pieces: tuple[tuple[int, jax.Array], ...]


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
