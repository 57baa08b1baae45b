"""Paged attention in XLA against the float64 reference, and the invariants that scheduling relies on."""

from __future__ import annotations

from functools import partial
from itertools import cycle, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.layout import MASKED, Ragged, Scales
from pallas_kernels.ops.kv_write.xla import write_kv
from pallas_kernels.ops.paged_attention import xla as attention_xla
from tests.support.examples import cases, examples, pairwise
from tests.support.kernels import reference
from tests.support.kernels.ragged import deal, make

Floats = npt.NDArray[np.float32]
Pools = list[tuple[jax.Array, jax.Array]]
PAGE, POOL, DIM, SCALE = 4, 48, 8, 0.3
# Around every boundary of a page and of a chunk of pages.
CONTEXTS = [1, PAGE - 1, PAGE, PAGE + 1, 31, 32, 33, 7]


def values(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def pools(kv_heads: int) -> tuple[Floats, Floats]:
    return values(POOL, PAGE, kv_heads, DIM, seed=1), values(POOL, PAGE, kv_heads, DIM, seed=2)


def dense(q: Floats, k_pool: Floats, v_pool: Floats, ragged: Ragged, **options: Any) -> npt.NDArray[np.float64]:
    return reference.attention(q, k_pool, v_pool, ragged, scale=SCALE, **options)[0]


@partial(jax.jit, static_argnames=("decode", "queries", "window", "softcap", "heads_first"))
def attend(q: Any, k_pool: Any, v_pool: Any, ragged: Ragged, **options: Any) -> Any:
    """Return XLA's attention on pools [N, B, K, D], transposed first if `heads_first`."""
    if options.get("heads_first"):
        k_pool, v_pool = (jnp.swapaxes(pool, 1, 2) for pool in (k_pool, v_pool))
    with jax.default_matmul_precision("highest"):
        return attention_xla.paged_attention_lse(q, k_pool, v_pool, ragged, scale=SCALE, **options)


# The options to combine. Decode has one row more than are computed together, and some rows share pages.
GROUPS = [(2, 1), (1, 4), (2, 5), (3, 8), (1, 16)]  # K, G
WINDOWS = [None, PAGE + 1, 20, 1]
CAPS = [None, 1.5]
STORED = [None, jnp.float8_e4m3fn, jnp.int8]
KINDS: dict[str, list[tuple[int, int]]] = {
    "decode": [(1, c) for c in (*CONTEXTS, *CONTEXTS)] + [(0, 0)],
    "verify": [(1, 1), (2, 5), (3, 3), (4, 33), (PAGE + 1, PAGE + 1), (0, 0), (16, 16), (15, 31), (1, 7), (8, 12)],
    "mixed": [(5, 5), (1, 33), (4, 9), (1, 1), (PAGE, PAGE), (20, 40), (0, 0), (PAGE - 1, PAGE - 1), (2, 32)],
}
EVERYTHING = list(product(WINDOWS, CAPS, STORED, [False, True], KINDS))  # heads first or not


FEW = list(product(WINDOWS[:3], CAPS, STORED, [False, True], KINDS))
BARE = [(group, *rest) for group, rest in zip(cycle(GROUPS), pairwise(FEW), strict=False)]
FULL = [(group, *rest) for group, rest in product(GROUPS, EVERYTHING)]


@pytest.mark.parametrize(
    ("heads", "window", "softcap", "stored", "first", "kind"), cases(BARE, FULL, apart=True), ids=str
)
def test_a_step_equals_the_reference(
    heads: tuple[int, int], window: int | None, softcap: float | None, stored: Any, first: bool, kind: str
) -> None:
    (kv_heads, group), rows = heads, KINDS[kind]
    dealt = deal(rows[: len(CONTEXTS)] if kind == "decode" else rows, page=PAGE, pool=POOL)
    tables = [*dealt, *dealt, []] if kind == "decode" else dealt
    size = sum(length for length, _ in rows)
    ragged = make(
        rows, tables, page=PAGE, pool=POOL, padded_rows=19, tokens=19 if kind == "decode" else size + 3, width=12
    )
    if kind == "decode":  # token i is all of row i, even if a row is empty
        ragged = ragged._replace(starts=np.arange(19, dtype=np.int32))
    q, (k, v), scales = values(len(ragged.rows), kv_heads * group, DIM), pools(kv_heads), None
    if stored is not None:
        scales = Scales(*(np.linspace(low, 0.03, kv_heads, dtype=np.float32) for low in (0.01, 0.02)))
        k, v = (reference.quantized(x, scale, stored) for x, scale in zip((k, v), scales, strict=True))
    promise = {"decode": {"decode": True}, "verify": {"queries": 16}, "mixed": {}}[kind]
    rule = {"window": window, "softcap": softcap, "scales": scales}
    out, lse = attend(q, k, v, ragged, heads_first=first, **rule, **promise)
    want, want_lse = reference.attention(q, k, v, ragged, scale=SCALE, **rule)
    np.testing.assert_allclose(out, want, atol=1e-5, rtol=0)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5, rtol=1e-6)
    assert np.all(np.asarray(lse)[np.asarray(ragged.rows) == 19] == np.float32(MASKED)), "padding sees no key"


@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 2, 3, 5]), st.sampled_from([0, 1, 3, 4, 5, 12])), min_size=1, max_size=9
    ),
    seed=st.integers(0, 9),
)
@settings(max_examples=examples(40))
def test_any_step_equals_the_dense_twin(rows: list[tuple[int, int]], seed: int) -> None:
    """Rows have `length` new tokens after `past` cached ones; one program of 45 tokens and 12 rows runs all."""
    steps = [(length, past + length if length else 0) for length, past in rows]
    ragged = make(
        steps, deal(steps, page=PAGE, pool=POOL, seed=seed), page=PAGE, pool=POOL, tokens=45, padded_rows=12, width=8
    )
    q = values(45, 4, DIM, seed=seed)
    for first in (False, True):
        got, _ = attend(q, *pools(2), ragged, heads_first=first)
        np.testing.assert_allclose(got, dense(q, *pools(2), ragged), atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, pytest.param(21, marks=pytest.mark.full)])
def test_prompts_of_several_tiles(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(attention_xla, "LARGE", attention_xla.Tile(32, 16))
    monkeypatch.setattr(attention_xla, "SMALL", attention_xla.Tile(8, 8))
    jax.clear_caches()
    # Tiles: two large; one of each; two small; none; one large.
    rows = [(50, 70), (40, 40), (12, 30), (1, 20), (17, 17)]
    ragged = make(rows, deal(rows, page=PAGE, pool=POOL), page=PAGE, pool=POOL, tokens=121, width=32)
    q = values(121, 4, DIM)  # 121 tokens, so that a last tile reaches past them
    got, _ = attend(q, *pools(2), ragged, window=window)
    np.testing.assert_allclose(got, dense(q, *pools(2), ragged, window=window), atol=1e-5, rtol=0)
    jax.clear_caches()


def test_a_step_of_padding_only_gives_zeros() -> None:
    ragged = make([(0, 0)], [[]], page=PAGE, pool=POOL, tokens=3, padded_rows=3)
    for decode in (True, False):
        assert not np.any(attend(values(3, 4, DIM), *pools(2), ragged, decode=decode)[0])


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("k_scale", [0.0, 1e-35, 1e3])
def test_key_scales_of_any_size(k_scale: float, decode: bool) -> None:
    rows = [(1, 9), (1, 30), (1, 1)] if decode else [(3, 9), (1, 30), (1, 1)]
    ragged = make(rows, deal(rows, page=PAGE, pool=POOL), page=PAGE, pool=POOL, width=8)
    q, (k, v), scales = values(len(ragged.rows), 4, DIM), pools(2), Scales(*np.ones((2, 2), np.float32))
    k, v = (reference.quantized(x, np.full(2, 0.03), jnp.int8) for x in (k, v))
    scales = scales._replace(k=scales.k * np.float32(k_scale))
    got, _ = attend(q, k, v, ragged, decode=decode, scales=scales)
    np.testing.assert_allclose(got, dense(q, k, v, ragged, scales=scales), atol=2e-3, rtol=0)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("window", "queries"), [(None, None), (9, 6)])
def test_a_row_has_the_same_bits_alone_and_beside_others(window: int | None, queries: int | None, first: bool) -> None:
    """Holds for programs of one shape, wherever the row is and however far the others reach."""
    rows = [(1, 30), (1, 44), (6, 21), (1, 3), (3, 30)]
    tables = deal(rows, page=PAGE, pool=POOL)
    q, shape = values(12, 4, DIM), {"page": PAGE, "pool": POOL, "width": 16, "tokens": 12, "padded_rows": 5}
    options = {"window": window, "queries": queries, "heads_first": first}
    together = attend(q, *pools(2), make(rows, tables, **shape), **options)
    begin = 0
    for row, table in zip(rows, tables, strict=True):
        mine = np.roll(q, -begin, axis=0)
        alone = attend(mine, *pools(2), make([row], [table], **shape), **options)
        for one, other in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[: row[0]], other[begin : begin + row[0]])
        begin += row[0]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_what_a_page_held_before_is_not_seen_even_if_nan(window: int | None, first: bool) -> None:
    """Neither after the context nor before every window of the row."""
    rows = [(1, 6), (3, 9), (1, 1)]
    ragged = make(rows, deal(rows, page=PAGE, pool=POOL), page=PAGE, pool=POOL, width=8)
    k, v = pools(2)
    q = values(5, 4, DIM)
    want, _ = attend(q, k, v, ragged, window=window, heads_first=first)
    seen = np.zeros((POOL, PAGE), bool)
    for (length, context), pages in zip(rows, np.asarray(ragged.block_tables), strict=True):
        at = np.arange(max(0, context - length + 1 - (window or context)), context)
        seen[pages[at // PAGE], at % PAGE] = True
    k[~seen], v[~seen] = np.nan, np.nan
    np.testing.assert_array_equal(attend(q, k, v, ragged, window=window, heads_first=first)[0], want)


def test_reads_of_lower_precision_sum_in_float32() -> None:
    rows = [(1, 30), (5, 20)]
    ragged = make(rows, deal(rows, page=PAGE, pool=POOL), page=PAGE, pool=POOL)
    q, (k, v) = values(6, 4, DIM), pools(2)
    got, _ = attend(*(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)), ragged)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), dense(q, k, v, ragged), atol=3e-2, rtol=0)


def test_shapes_that_do_not_fit_are_named() -> None:
    ragged = make([(1, 1), (1, 1)], [[1], [2]], page=PAGE, pool=POOL)
    with pytest.raises(ValueError, match=r"H a multiple of K"):
        attention_xla.paged_attention(jnp.zeros((2, 3, DIM)), *map(jnp.asarray, pools(2)), ragged, scale=1.0)
    with pytest.raises(ValueError, match="there are 3 tokens and 2 rows"):
        attend(values(3, 2, DIM), *pools(2), ragged, decode=True)


SHORT = [(1, False), (5, True), (12, True), (16, False)]


@pytest.mark.parametrize(("columns", "first"), cases(SHORT, product([1, 5, 12, 16], [False, True]), apart=True))
def test_a_short_block_table_does_not_make_it_copy_the_pool(columns: int, first: bool) -> None:
    """Check the compiled memory: with a table of one chunk, XLA copied every pool at each decode step."""
    pool, q = jnp.zeros((4096, *((2, 16) if first else (16, 2)), 128)), jnp.zeros((1, 4, 128))
    ragged = make([(1, 8)], [[0]], page=16, pool=4096, width=columns)

    @partial(jax.jit, donate_argnums=1)
    def step(q: jax.Array, pools: Pools, ragged: Ragged) -> tuple[jax.Array, Pools]:
        filled = []
        for pool in pools:
            k, v = write_kv(*pool, q[:, :2], q[:, :2], ragged, heads_first=first)
            q = attention_xla.paged_attention(q, k, v, ragged, scale=SCALE, decode=True, heads_first=first)
            filled.append((k, v))
        return q, filled

    memory = step.lower(q, [(pool, pool)] * 2, ragged).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2**22, "a pool has 2**26 bytes"
