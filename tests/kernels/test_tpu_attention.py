"""TPU attention in the interpreter against float64, at every edge: decode and prefill; plans, configs, refusals."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention import tpu
from pallas_kernels.ops.paged_attention.api import AttentionInputs, AttentionSpec
from pallas_kernels.ops.paged_attention.tpu import config
from pallas_kernels.ops.paged_attention.tpu import kernel as body
from pallas_kernels.ops.paged_attention.tpu.config import LEAST, Config, TpuShape, decode_config, prefill_config
from pallas_kernels.ops.paged_attention.tpu.lanes import Row, row_of
from pallas_kernels.ops.paged_attention.tpu.plan import most_items, plan_decode, plan_prefill
from tests.support.examples import examples
from tests.support.kernels import reference
from tests.support.kernels.ragged import deal, make
from tests.support.kernels.tpu import POOL, Options, check, races_found, run, step

PAGE = 4
# Around the ends of pages, and of tiles of two pages.
CONTEXTS = [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, 5 * PAGE + 2]
SINGLE = [(1, context) for context in CONTEXTS]
SEVERAL = [(1, 1), (4, 4), (3, PAGE + 1), (2, 2 * PAGE), (4, 2 * PAGE + 2), (1, 17)]
TILE = 2 * PAGE


def test_single_tokens_at_every_edge() -> None:
    """The step includes a longer row and an empty one, which decode does not compute.

    A row alone gives the same bits as beside other rows.
    """
    given = step([*SINGLE[:4], (3, 7), (0, 0), *SINGLE[4:]], 2, 4)
    options = Options(Config(1, TILE, mixed=True))
    out, lse = check(given, options)
    row = len(CONTEXTS) + 1  # the longest row
    lengths = np.where(np.arange(len(given.ragged.lengths)) == row, given.ragged.lengths, 0)
    alone, alone_lse = run(dataclasses.replace(given, ragged=given.ragged._replace(lengths=lengths)), options)
    mine = np.asarray(given.ragged.rows) == row
    np.testing.assert_array_equal(out[mine], alone[mine])
    np.testing.assert_array_equal(lse[mine], alone_lse[mine])
    assert not np.any(alone[~mine])


def test_several_tokens_apart_in_a_window_under_a_cap() -> None:
    check(step(SEVERAL, 2, 5), Options(Config(4, TILE, mixed=False), window=6, softcap=3.0))


def test_int8_pools_times_their_scales() -> None:
    check(step(SINGLE, 2, 2, dtype="bfloat16", stored="int8"), Options(Config(1, TILE, mixed=True)))


def test_a_copy_that_is_not_waited_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the test: without its wait, the kernel reads data that has not arrived."""
    monkeypatch.setattr(body.Pages, "wait", lambda *_: None)
    jax.clear_caches()
    out, _ = run(step(SINGLE, 1, 1), Options(Config(1, TILE, mixed=True)))
    jax.clear_caches()
    assert races_found() or not np.all(np.isfinite(out))


@pytest.mark.full
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("queries", [1, 4, 16])
@pytest.mark.parametrize("group", [1, 4, 5, 8, 16])
def test_groups_and_queries(group: int, queries: int, mixed: bool) -> None:
    rows = [(1, 1), (1, PAGE), (min(2, queries), PAGE + 1), (queries, queries + 5), (queries, queries)]
    check(step(rows, 2, group), Options(Config(queries, TILE, mixed=mixed)))


@pytest.mark.full
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
@pytest.mark.parametrize("page", [4, 8, 16])
@pytest.mark.parametrize("mixed", [True, False])
def test_pages_and_kv_heads(page: int, kv_heads: int, mixed: bool) -> None:
    rows = [(1, page - 1), (1, page), (1, page + 1), (2, 2 * page + 1), (1, 1)]
    check(step(rows, kv_heads, 2, page=page), Options(Config(2, 16, mixed=mixed)))


@pytest.mark.full
@pytest.mark.parametrize("window", [1, 3, 8, 9, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("mixed", [True, False])
def test_windows_and_caps(window: int, softcap: float | None, mixed: bool) -> None:
    check(step(SEVERAL, 2, 2), Options(Config(4, TILE, mixed=mixed), window=window, softcap=softcap))


@pytest.mark.full
@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mixed", [True, False])
def test_quantized_pools(stored: str, dtype: str, mixed: bool) -> None:
    check(step(SEVERAL, 2, 4, dtype=dtype, stored=stored), Options(Config(4, TILE, mixed=mixed), softcap=5.0))


@pytest.mark.full
@pytest.mark.parametrize("mixed", [True, False])
def test_shared_pages(mixed: bool) -> None:
    rows = [(1, 10), (2, 11), (1, 6)]
    check(step(rows, 2, 2, tables=[[3, 7, 5], [3, 7, 9], [3, 8]]), Options(Config(2, TILE, mixed=mixed)))


@pytest.mark.full
def test_a_step_without_rows() -> None:
    given = step([(0, 0)], 2, 2, tables=[[]])
    out, lse = run(given, Options(Config(1, TILE, mixed=True)))
    assert not np.any(out) and np.all(lse < -1e29)


def test_the_plan_places_every_token_of_its_rows_once() -> None:
    rows = [(3, 9), (1, 1), (0, 0), (5, 5), (2, 12)]
    ragged = make(rows, deal(rows, page=4, pool=POOL), page=4, pool=POOL, tokens=14, padded_rows=7)
    work = jax.tree.map(np.asarray, jax.jit(partial(plan_decode, queries=3))(ragged))
    count = int(work.items[0])
    assert count == 3 and list(work.rows[:count]) == [0, 1, 4]
    assert list(work.firsts[:count]) == [6, 0, 10] and list(work.ends[:count]) == [9, 1, 12]
    assert list(work.slots) == [0, 1, 2, 3, *[21] * 5, 6, 7, *[21] * 3], (
        "the row of 5 is left to prefill, 3 are padding"
    )


def test_a_config_that_does_not_fit_says_so() -> None:
    shape = TpuShape(32, 8, 128, 64)
    assert decode_config(shape).mixed and not decode_config(shape, 16).mixed
    decode_config(shape, 16).validate(shape)
    with pytest.raises(ValueError, match=r"needs \d+ bytes of VMEM"):
        Config(512, 4096).validate(shape)
    with pytest.raises(ValueError, match=r"self\.queries=0 and self\.keys=256 must be at least 1"):
        Config(0).validate(shape)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"head_dim": 256}, None),
        ({"kv_heads": 2, "heads": 8}, None),
        ({"platform": "gpu"}, "it needs a TPU; this is gpu"),
        ({"platform": "cpu", "interpret": True}, None),
        ({"dtype": "float16"}, "float16 activations"),
        ({"kv_heads": 5, "heads": 40}, "a power of two"),
        ({"head_dim": 64}, None),
        ({"head_dim": 64, "kv_dtype": "int8"}, "head dim 64 with 8 kv heads per shard and 8-bit pools; it must be"),
        ({"head_dim": 192}, "head dim 192 with 8 kv heads per shard"),
        ({"head_dim": 256, "kv_heads": 2}, "a multiple of 128 with a multiple of 8 kv heads"),
        ({"kv_heads": 1}, "1 kv heads per shard in 16-bit pools"),
        ({"kv_heads": 2, "kv_dtype": "int8"}, "32-bit words, so at least 4 are needed"),
        ({"kv_heads": 1, "dtype": "float32"}, None),
        ({"page": 8}, "a multiple of 16"),
    ],
)
def test_what_it_supports(change: dict[str, object], reason: str | None) -> None:
    spec = dataclasses.replace(
        AttentionSpec("bfloat16", platform="tpu", heads=32, kv_heads=8, head_dim=128, page=64), **change
    )
    told = config.supports(spec)
    assert told is None if reason is None else told is not None and reason in told


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
def test_pages_and_kv_heads_of_prefill(page: int, kv_heads: int) -> None:
    rows = [(page - 1, page - 1), (page, page), (page + 1, page + 1), (page + 1, 2 * page + 2)]
    check(step(rows, kv_heads, 2, page=page), Options(Config(8, 16, mixed=False), above=1))


@pytest.mark.full
@pytest.mark.parametrize("window", [1, 3, 8, 9, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_windows_and_caps_of_prefill(window: int, softcap: float | None) -> None:
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


SPEC = AttentionSpec("float32", platform="cpu", heads=8, kv_heads=4, head_dim=64, page=16, interpret=True)


@pytest.mark.parametrize(("rows", "shared", "group", "pad"), [(1, 1, 2, 4), (2, 2, 3, 0), (3, 2, 1, 1)])
def test_scores_and_values_are_those_of_the_own_head(rows: int, shared: int, group: int, pad: int) -> None:
    kv_heads, dim = rows * shared, 4
    row, rng = Row(kv_heads, shared, dim, shared * dim + pad), np.random.default_rng(0)
    k, v = (rng.integers(-9, 9, (5, kv_heads, dim)).astype(np.float32) for _ in "kv")
    q = rng.integers(-9, 9, (3, kv_heads * group, dim)).astype(np.float32)
    keys, values, queries = (np.asarray(x) for x in (row.joined(jnp.asarray(k)), row.joined(v), row.spread(q)))
    assert keys.shape == (5, rows, row.width) and queries.shape == (*q.shape[:2], row.width)
    wide = queries.reshape(3, rows, shared * group, row.width)
    scores = np.einsum("trgd,jrd->trgj", wide, keys)
    mixed = np.einsum("trgj,jrd->trgd", scores, values).reshape(*q.shape[:2], row.width)
    want = np.einsum("tkgd,jkd->tkgj", q.reshape(3, kv_heads, group, dim), k)
    np.testing.assert_array_equal(scores.reshape(want.shape), want)
    want = np.einsum("tkgj,jkd->tkgd", want, v).reshape(q.shape)
    np.testing.assert_array_equal(np.asarray(row.own(jnp.asarray(mixed))), want)


@pytest.mark.parametrize(
    ("heads", "dim", "stored", "found"),
    [
        (8, 128, "", (1, 128)),
        (8, 256, "", (1, 256)),
        (8, 64, "", (2, 128)),
        (4, 64, "", (2, 128)),
        (2, 64, "", (1, 128)),  # one row of bfloat16 would not fill a word
        (8, 80, "", (1, 128)),
        (8, 64, "int8", (1, 64)),
        (8, 32, "", (1, 32)),
    ],
)
def test_what_a_row_holds(heads: int, dim: int, stored: str, found: tuple[int, int]) -> None:
    spec = AttentionSpec("bfloat16", heads, heads, dim, 16, platform="tpu", kv_dtype=stored)
    assert tpu.row(spec) == found and row_of(spec).plain == (found == (1, dim))
    assert (tpu.supports(spec) is None) == (found[1] >= 128)


def test_a_layer_whose_heads_share_rows() -> None:
    """Write and attend to prompts and single tokens; the rest of the pools is finite, as in an engine."""
    rows = [(1, 20), (18, 30), (1, 1)]
    tables = deal(rows, page=16, pool=8)
    ragged = jax.tree.map(jnp.asarray, make(rows, tables, page=16, pool=8, tokens=24, padded_rows=4, width=2))
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.standard_normal((24, heads, 64)), jnp.float32) for heads in (8, 4, 4))
    pools = [jnp.asarray(rng.standard_normal((8, 16, 4, 64)), jnp.float32) for _ in "kv"]
    row, layer = row_of(SPEC), tpu.make(SPEC, decode=False)
    assert not row.plain
    held = tuple(row.joined(pool.reshape(-1, 4, 64)).reshape(8, 16, 2, 128) for pool in pools)
    inputs = AttentionInputs(q, k, v, None, scale=0.2)
    mixed, after = jax.jit(lambda inputs: layer(inputs, held, layer.plan(ragged)))(inputs)
    written = [reference.written(pool, new, ragged.write) for pool, new in zip(pools, (k, v), strict=True)]
    want, _ = reference.attention(q, *written, ragged, scale=0.2)
    assert reference.error(mixed, want) < 2e-6
    for pool, lies in zip(written, after, strict=True):
        np.testing.assert_array_equal(np.asarray(lies).reshape(8, 16, 4, 64), pool)
