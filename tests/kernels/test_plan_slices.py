"""Rows cut into slices: every token is in exactly one slice, which sees its row up to the slice's own last token."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ops.mla.plan import most_slices, sliced
from tests.support.examples import examples
from tests.support.kernels.ragged import deal, make

PAGE = 4


cut_into = jax.jit(sliced, static_argnames="queries")  # all steps have one shape, so five programs


@settings(deadline=None, max_examples=examples(30))
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=4), st.integers(1, 5))
def test_every_token_is_in_one_slice_of_its_row(drawn: list[tuple[int, int]], queries: int) -> None:
    rows = [(length, length + before if length else 0) for length, before in drawn]
    tables = deal(rows, page=PAGE, pool=40)
    ragged = make(rows, tables, page=PAGE, pool=40, tokens=37, padded_rows=5, width=6)
    cut = jax.tree.map(np.asarray, cut_into(ragged, queries=queries))
    count = len(cut.lengths)
    assert count == most_slices(len(ragged.rows), len(ragged.lengths), queries)
    seen = np.zeros(len(ragged.rows), int)
    for slice_, (start, length, context) in enumerate(zip(cut.starts, cut.lengths, cut.contexts, strict=True)):
        assert 0 <= length <= queries
        here = np.arange(start, start + length)
        seen[here] += 1
        assert np.all(cut.rows[here] == slice_)
        if length:
            assert np.all(ragged.positions[here] == np.arange(context - length, context))
            assert np.array_equal(cut.block_tables[slice_], ragged.block_tables[ragged.rows[here[0]]])
            assert len(set(ragged.rows[here])) == 1
        else:
            assert context == 0
    padding = ragged.rows == len(ragged.lengths)
    assert np.array_equal(seen, np.where(padding, 0, 1))
    assert np.all(cut.rows[padding] == count)
    np.testing.assert_array_equal(cut.write, ragged.write)


def test_a_slice_has_a_token_at_least() -> None:
    with pytest.raises(ValueError, match="queries=0 must be positive"):
        sliced(make([(1, 1)], [[1]], page=PAGE, pool=4), 0)
