"""TPU prefill in the interpreter against float64: chunks at offsets, mixed lengths, windows, caps; and its plan."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ops.paged_attention.tpu.config import LEAST, Config, TpuShape, prefill_config
from pallas_kernels.ops.paged_attention.tpu.plan import most_items, plan_prefill
from tests.support.examples import examples
from tests.support.kernels.ragged import deal, make
from tests.support.kernels.tpu import Options, check, run, step

PAGE, TILE = 4, 8
plan = jax.jit(plan_prefill, static_argnames=("queries", "above"))
# (tokens of the chunk, context after it): whole prompts, chunks at offsets, around the ends of pages, tiles and items.
CHUNKS = [(9, 9), (2, 2), (PAGE, PAGE), (PAGE + 1, 2 * PAGE + 1), (1, 6), (8, 21), (3, PAGE - 1), (7, 17)]


def test_chunks_at_offsets_beside_a_decode_row() -> None:
    check(step(CHUNKS, 2, 4), Options(Config(4, TILE, mixed=False), above=1))


def test_a_window_and_a_cap_over_shared_pages() -> None:
    rows, tables = [(5, 13), (6, 14)], [[3, 7, 5, 1], [3, 7, 9, 2]]
    check(step(rows, 2, 2, tables=tables), Options(Config(4, TILE, mixed=True), above=1, window=5, softcap=4.0))


@pytest.mark.full
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("group", [1, 4, 5, 8, 16])
@pytest.mark.parametrize("queries", [1, 4, 8])
def test_groups_and_items(group: int, queries: int, mixed: bool) -> None:
    check(step(CHUNKS, 2, group), Options(Config(queries, TILE, mixed=mixed), above=0))


@pytest.mark.full
@pytest.mark.parametrize("page", [4, 8, 16])
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
def test_pages_and_kv_heads(page: int, kv_heads: int) -> None:
    rows = [(page - 1, page - 1), (page, page), (page + 1, page + 1), (page + 1, 2 * page + 2)]
    check(step(rows, kv_heads, 2, page=page), Options(Config(8, 16, mixed=False), above=1))


@pytest.mark.full
@pytest.mark.parametrize("window", [1, 3, 8, 9, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_windows_and_caps(window: int, softcap: float | None) -> None:
    check(step(CHUNKS, 2, 2), Options(Config(4, TILE, mixed=False), above=1, window=window, softcap=softcap))


@pytest.mark.full
@pytest.mark.parametrize("stored", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes(stored: str | None, dtype: str) -> None:
    check(step(CHUNKS, 2, 4, dtype=dtype, stored=stored), Options(Config(4, TILE, mixed=False), above=1))


@pytest.mark.full
def test_a_step_of_decode_rows_only() -> None:
    out, lse = run(step([(1, 5), (1, 9)], 2, 2), Options(Config(4, TILE, mixed=False), above=1))
    assert not np.any(out) and np.all(lse < -1e29)


@given(
    rows=st.lists(st.tuples(st.integers(0, 13), st.integers(0, 9)), min_size=1, max_size=6),
    cut=st.sampled_from([(1, 0), (4, 1), (8, 4)]),
)
@settings(max_examples=examples(40))
def test_every_token_of_its_rows_is_in_one_item(rows: list[tuple[int, int]], cut: tuple[int, int]) -> None:
    """For rows of `length` tokens after `past`, items tile each row and fit their static bound."""
    queries, above = cut
    steps = [(length, length + past if length else 0) for length, past in rows]
    ragged = make(steps, deal(steps, page=4, pool=64), page=4, pool=64, tokens=80, padded_rows=8, width=8)
    work = jax.tree.map(np.asarray, plan(ragged, queries=queries, above=above))
    bound = most_items(80, 8, queries=queries, above=above)
    count, mine = int(work.items[0]), ragged.lengths > above
    assert count == sum(-(-length // queries) for length in ragged.lengths[mine]) <= bound == len(work.rows)
    for token, row in enumerate(ragged.rows):
        if row == 8 or not mine[row]:
            assert work.slots[token] == bound * queries
            continue
        item, inside = divmod(int(work.slots[token]), queries)
        assert item < count and work.rows[item] == row and work.tokens[item] + inside == token
        assert work.firsts[item] + inside == ragged.positions[token] < work.ends[item] <= ragged.contexts[row]
    real = work.slots[work.slots < bound * queries]
    assert len(set(real)) == len(real)


def test_items_get_smaller_where_vector_memory_is_short() -> None:
    small, large = TpuShape(32, 8, 128, 64), TpuShape(128, 16, 256, 64)
    assert prefill_config(small).queries > prefill_config(large).queries >= LEAST
    for shape in (small, large):
        prefill_config(shape).validate(shape)
