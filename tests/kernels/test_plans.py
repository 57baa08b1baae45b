"""The work lists of attention: decode reads every key tile once, prefill every token of a long row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.layout import Ragged
from pallas_kernels.ops.paged_attention.plan import (
    BEGIN,
    POSITION,
    ROW,
    TOKENS,
    DecodeWork,
    PrefillWork,
    most_tiles,
    part_of,
    plan_decode,
    plan_prefill,
)
from tests.support.examples import examples
from tests.support.kernels.ragged import deal, make

PAGE, QUERIES, ROWS = 16, 4, 8

lengths = st.sampled_from([0, 1, 1, 1, 2, QUERIES, QUERIES + 1, 40])
pasts = st.sampled_from([0, 1, PAGE - 2, PAGE - 1, PAGE, 3 * PAGE, 100, 700])
steps = st.lists(st.tuples(lengths, pasts), min_size=1, max_size=ROWS)


class Cut(NamedTuple):
    """How the line is cut; only a few, because each one compiles a program."""

    workers: int
    tile: int = 16
    extra: int = 1
    window: int | None = None


cuts = st.sampled_from([Cut(1), Cut(3, extra=0), Cut(9), Cut(8, 64, 2), Cut(5, 8, 0, 1), Cut(9, 16, 1, 40)])


@lru_cache
def program(cut: Cut) -> Callable[[Ragged], DecodeWork]:
    return jax.jit(partial(plan_decode, page=PAGE, queries=QUERIES, **cut._asdict()))


def plan(rows: list[tuple[int, int]], cut: Cut) -> DecodeWork:
    """Plan rows of (length, context)."""
    ragged = make(rows, deal(rows, page=PAGE, pool=512), page=PAGE, pool=512, padded_rows=ROWS, tokens=400, width=48)
    return DecodeWork(*map(np.asarray, program(cut)(ragged)))


def contexts(steps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(length, past + length if length else 0) for length, past in steps]


def read(work: DecodeWork) -> list[list[tuple[int, int]]]:
    """Return the (row, tile) pairs in the order in which each worker reads them."""
    return [
        [
            (int(work.row[item]), tile)
            for item in range(work.cuts[worker], work.cuts[worker + 1])
            for tile in range(work.first[item], work.first[item] + work.tiles[item])
        ]
        for worker in range(work.workers)
    ]


def seen(rows: list[tuple[int, int]], cut: Cut) -> set[tuple[int, int]]:
    """Return the (row, tile) pairs that decode must read."""
    return {
        (row, key // cut.tile)
        for row, (length, context) in enumerate(rows)
        if 1 <= length <= QUERIES
        for key in range(0 if cut.window is None else max(0, context - length + 1 - cut.window), context)
    }


@given(steps, cuts)
@settings(max_examples=examples(100), deadline=None)
def test_every_tile_that_a_token_sees_is_read_once_in_equal_shares(steps: list[tuple[int, int]], cut: Cut) -> None:
    rows = contexts(steps)
    work = plan(rows, cut)
    shares, wanted = read(work), seen(rows, cut)
    found = Counter(one for share in shares for one in share)
    assert set(found) == wanted and all(times == 1 for times in found.values())
    tiles = Counter(row for row, _ in wanted)
    units = sum(count + cut.extra for count in tiles.values())
    assert max(map(len, shares)) <= -(-units // cut.workers)
    if not cut.extra:
        busy = [len(share) for share in shares if share]
        assert len(set(busy[:-1])) <= 1, "all busy workers but the last have equal shares"


@given(steps, cuts)
@settings(max_examples=examples(80), deadline=None)
def test_items_are_few_dense_and_found_from_their_rows(steps: list[tuple[int, int]], cut: Cut) -> None:
    """Those of split rows have partial results of their own."""
    work = plan(contexts(steps), cut)
    assert work.row.shape == (cut.workers + ROWS,)
    used = int(work.cuts[-1])
    assert work.cuts[0] == 0 and used == work.splits.sum()
    assert np.all(np.diff(work.cuts) >= 0)
    assert np.all(work.tiles[:used] > 0), "no item is empty"
    assert not np.any(work.tiles[used:]), "items after the last are empty"
    parts = []
    for row in range(ROWS):
        begin, count = work.begins[row], work.splits[row]
        np.testing.assert_array_equal(np.flatnonzero((work.row == row) & (work.tiles > 0)), begin + np.arange(count))
        mine = work.part[begin:][:count].tolist()
        expected = [int(part_of(work.worker[row] + n, n > 0)) for n in range(count)]
        assert mine == (expected if count > 1 else [-1] * count)
        parts += mine if count > 1 else []
    assert len(set(parts)) == len(parts) and all(0 <= part < work.most_parts for part in parts)
    assert work.tokens == sum(length for length, _ in steps)


def test_tables_hold_whole_tiles_of_pages() -> None:
    ragged = make([(1, 33)], [[3, 1, 2]], page=PAGE, pool=8)
    work = plan_decode(ragged, page=PAGE, queries=1, tile=64, workers=2)
    np.testing.assert_array_equal(work.table, [[3, 1, 2, 2]])


def test_what_does_not_fit_is_named() -> None:
    ragged = make([(1, 1)], [[1]], page=PAGE, pool=4)
    with pytest.raises(ValueError, match="tile=24 must be a multiple or a divisor of page=16"):
        plan_decode(ragged, page=PAGE, queries=1, tile=24, workers=2)
    with pytest.raises(ValueError, match="workers=0"):
        plan_decode(ragged, page=PAGE, queries=1, tile=16, workers=0)


PREFILL_PAGE, PREFILL_POOL, KEYS, TOKENS_MOST, ROWS_MOST = 8, 200, 16, 64, 8


@partial(jax.jit, static_argnames=("tile", "above", "window"))
def planned(ragged: Ragged, tile: int, above: int, window: int | None) -> PrefillWork:
    return plan_prefill(ragged, page=PREFILL_PAGE, tile=tile, keys=KEYS, above=above, window=window)


def step(rows: list[tuple[int, int]]) -> Ragged:
    tables = deal(rows, page=PREFILL_PAGE, pool=PREFILL_POOL)
    return make(rows, tables, page=PREFILL_PAGE, pool=PREFILL_POOL, tokens=TOKENS_MOST, padded_rows=ROWS_MOST, width=11)


def prefill_of(rows: list[tuple[int, int]], tile: int = 8, above: int = 2, window: int | None = None) -> PrefillWork:
    work: PrefillWork = jax.tree.map(np.asarray, planned(step(rows), tile=tile, above=above, window=window))
    return work


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
    work, ragged = prefill_of(rows, tile, above, window), step(rows)
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
    work = prefill_of([(20, 80), (1, 70), (20, 20), (9, 50)], window=window)
    used = work.tiles[: int(work.used[0])]
    last = used[:, POSITION] + used[:, TOKENS]
    seen = last - (0 if window is None else np.maximum(used[:, POSITION] - window + 1, 0))
    assert (np.diff(seen) <= 0).all()
    assert set(used[:, ROW]) == {0, 2, 3}
    assert len(set(used[:, BEGIN])) == len(used) == 3 + 3 + 2


def test_the_bound_on_tiles_is_met_by_the_worst_step() -> None:
    # Rows one token longer than whole tiles, so that each ends in a tile of one token.
    assert (
        int(prefill_of([(9, 9)] * 7, tile=8, above=2).used[0]) == most_tiles(TOKENS_MOST - 1, 7, tile=8, above=2) == 14
    )


def test_the_table_holds_whole_tiles_of_keys() -> None:
    work = prefill_of([(20, 80)])
    assert work.table.shape == (ROWS_MOST, 12), "11 pages, read two at a time"


def test_what_does_not_fit_prefill_is_named() -> None:
    with pytest.raises(ValueError, match="keys=12 must be a multiple or a divisor of page=8"):
        plan_prefill(step([(3, 3)]), page=PREFILL_PAGE, tile=8, keys=12, above=1)
    with pytest.raises(ValueError, match="window=0 must be positive"):
        plan_prefill(step([(3, 3)]), page=PREFILL_PAGE, tile=8, keys=16, above=1, window=0)
