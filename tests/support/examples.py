"""Numbers of hypothesis examples by profile, and samples of matrices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def cases(some: Sequence[Any], every: Iterable[Any], *, apart: bool = False) -> list[Any]:
    """Return the values of a parameter: some in bare runs, every other one of the matrix with `-m full`.

    apart: each case has the values of several parameters.
    """
    rest = [case for case in dict.fromkeys(every) if case not in some]
    full = [pytest.param(*(case if apart else [case]), marks=pytest.mark.full) for case in rest]
    return [*some, *full]


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
