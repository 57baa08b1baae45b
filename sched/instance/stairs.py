"""Fitting of a step's prompt chunks to the sizes that steps are padded to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..api.perf import Load

LONGER = 1.01  # factor on a step's predicted time that more tokens within the same size may cost, for their attention
SAVED = 0.9  # share of a padded step's predicted time that its two parts may take together


class Chunk(NamedTuple):
    """A prompt's part of a step, in tokens."""

    start: int  # computed before the step
    length: int
    left: int  # of the prompt, not computed before the step


def fitted(
    rows: Load, chunks: Sequence[Chunk], stairs: Sequence[int], most: int, seconds: Callable[[Load], float]
) -> list[int]:
    """Return the lengths of a step's chunks that suit the sizes which steps are padded to.

    Tokens up to the padded size are computed anyway, so chunks that are not the end of their prompt
    grow, the first ones first. If the step is still just above a size, its last chunk is cut back to it,
    provided that this step and one with the rest are predicted to take less time together: with the
    rest next, every request of the step is earlier.

    rows: the load of the step's decodes. stairs: the sizes, ascending. most: the largest step.
    seconds: predicts the time of a load.
    """
    lengths = [chunk.length for chunk in chunks]
    total = rows.tokens + sum(lengths)
    at = bisect_left(stairs, total)
    if at == len(stairs) or stairs[at] == total:
        return lengths
    padded = seconds(_loaded(rows, chunks, lengths))
    grown = _grown(chunks, min(stairs[at], most) - total)
    if grown != lengths and seconds(_loaded(rows, chunks, grown)) <= LONGER * padded:
        lengths, total = grown, rows.tokens + sum(grown)
    excess = total - (stairs[at - 1] if at else 0)
    kept = lengths[-1] - excess
    if kept <= 0 or total == stairs[at]:
        return lengths
    cut = [*lengths[:-1], kept]
    rest = rows.add_chunk(excess, chunks[-1].start + kept)
    return cut if seconds(_loaded(rows, chunks, cut)) + seconds(rest) < SAVED * padded else lengths


def _grown(chunks: Sequence[Chunk], spare: int) -> list[int]:
    lengths = []
    for chunk in chunks:
        more = max(0, min(spare, chunk.left - chunk.length))
        spare -= more
        lengths.append(chunk.length + more)
    return lengths


def _loaded(rows: Load, chunks: Sequence[Chunk], lengths: Sequence[int]) -> Load:
    for chunk, length in zip(chunks, lengths, strict=True):
        rows = rows.add_chunk(length, chunk.start)
    return rows
