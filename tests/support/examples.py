"""Numbers of hypothesis examples by profile, and samples of matrices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import settings

LEAST, USUAL = 5, 100


def whole() -> bool:
    """Return whether this run checks whole matrices, as the profile `full` does."""
    return settings.default.max_examples >= USUAL


def examples(count: int) -> int:
    """Return `count` in the profile `full`, scaled for the other profiles (tests/conftest.py)."""
    return max(LEAST, count * settings.default.max_examples // USUAL)


def quick_or_full(rows: Iterable[tuple[Any, ...]], quick: Collection[tuple[Any, ...]]) -> list[Any]:
    """Make parameters: the rows in `quick` always run, the others with `-m full`."""
    return [pytest.param(*row, marks=() if row in quick else pytest.mark.full) for row in rows]


def cases(some: Sequence[Any], every: Sequence[Any]) -> list[Any]:
    """Return the values of a parameter: some in bare runs, every other one of the matrix with `-m full`."""
    return [*some, *(pytest.param(case, marks=pytest.mark.full) for case in every if case not in some)]


def pairwise(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Choose a few of the rows that together contain every pair of values that any row contains."""

    def pairs(row: tuple[Any, ...]) -> set[Any]:
        return set(combinations(enumerate(map(str, row)), 2))

    wanted = set().union(*map(pairs, rows))
    chosen = []
    while wanted:
        chosen.append(max(rows, key=lambda row: len(pairs(row) & wanted)))
        wanted -= pairs(chosen[-1])
    return chosen
