"""The work list of prefill: every token of a long row exactly once, for any step."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.layout import Ragged
from pallas_kernels.ops.paged_attention.plan import BEGIN, POSITION, ROW, TOKENS, PrefillWork, most_tiles, plan_prefill
from tests.support.examples import examples
from tests.support.kernels.ragged import deal, make

PAGE, POOL, KEYS, TOKENS_MOST, ROWS_MOST = 8, 200, 16, 64, 8


@partial(jax.jit, static_argnames=("tile", "above", "window"))
def planned(ragged: Ragged, tile: int, above: int, window: int | None) -> PrefillWork:
    return plan_prefill(ragged, page=PAGE, tile=tile, keys=KEYS, above=above, window=window)


def step(rows: list[tuple[int, int]]) -> Ragged:
    tables = deal(rows, page=PAGE, pool=POOL)
    return make(rows, tables, page=PAGE, pool=POOL, tokens=TOKENS_MOST, padded_rows=ROWS_MOST, width=11)


def plan(rows: list[tuple[int, int]], tile: int = 8, above: int = 2, window: int | None = None) -> PrefillWork:
    made: PrefillWork = jax.tree.map(np.asarray, planned(step(rows), tile=tile, above=above, window=window))
    return made


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=ROWS_MOST).filter(lambda x: sum(x) <= TOKENS_MOST),
    past=st.lists(st.integers(0, 60), min_size=ROWS_MOST, max_size=ROWS_MOST),
    options=st.sampled_from([(4, 0, None), (8, 4, 10), (32, 1, 1)]),
)
@settings(max_examples=examples(40), deadline=None)
def test_every_token_of_a_long_row_is_in_exactly_one_tile(
    lengths: list[int], past: list[int], options: tuple[int, int, int | None]
) -> None:
    tile, above, window = options
    rows = [(length, length + before if length else 0) for length, before in zip(lengths, past, strict=False)]
    work, ragged = plan(rows, tile, above, window), step(rows)
    count, found = int(work.used[0]), []
    assert len(work.tiles) == most_tiles(TOKENS_MOST, ROWS_MOST, tile=tile, above=above) >= count
    assert not work.tiles[count:].any(), "unused tiles come last and are empty"
    for i, (row, begin, tokens, position) in enumerate(work.tiles[:count]):
        assert 0 < tokens <= tile
        here = np.arange(begin, begin + tokens)
        np.testing.assert_array_equal(ragged.rows[here], row)
        np.testing.assert_array_equal(ragged.positions[here], position + np.arange(tokens))
        np.testing.assert_array_equal(work.place[here], i * tile + np.arange(tokens))
        found.extend(here)
    long = [row for row, length in enumerate(lengths) if length > above]
    np.testing.assert_array_equal(sorted(found), np.flatnonzero(np.isin(ragged.rows, long)))
    others = np.setdiff1d(np.arange(TOKENS_MOST), np.asarray(found, int))
    np.testing.assert_array_equal(work.place[others], -1)


@pytest.mark.parametrize("window", [None, 12])
def test_tiles_that_see_most_keys_come_first(window: int | None) -> None:
    work = plan([(20, 80), (1, 70), (20, 20), (9, 50)], window=window)
    used = work.tiles[: int(work.used[0])]
    last = used[:, POSITION] + used[:, TOKENS]
    seen = last - (0 if window is None else np.maximum(used[:, POSITION] - window + 1, 0))
    assert (np.diff(seen) <= 0).all()
    assert set(used[:, ROW]) == {0, 2, 3}
    assert len(set(used[:, BEGIN])) == len(used) == 3 + 3 + 2


def test_the_bound_on_tiles_is_met_by_the_worst_step() -> None:
    # Rows one token longer than whole tiles, so that each ends in a tile of one token.
    assert int(plan([(9, 9)] * 7, tile=8, above=2).used[0]) == most_tiles(TOKENS_MOST - 1, 7, tile=8, above=2) == 14


def test_the_table_holds_whole_tiles_of_keys() -> None:
    work = plan([(20, 80)])
    assert work.table.shape == (ROWS_MOST, 12), "11 pages, read two at a time"


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="keys=12 must be a multiple or a divisor of page=8"):
        plan_prefill(step([(3, 3)]), page=PAGE, tile=8, keys=12, above=1)
    with pytest.raises(ValueError, match="window=0 must be positive"):
        plan_prefill(step([(3, 3)]), page=PAGE, tile=8, keys=16, above=1, window=0)
