"""Paged attention in XLA against a dense float64 twin, and the laws that scheduling relies on."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import attention_xla
from pallas_kernels.layout import Ragged
from pallas_kernels.xla import rows as rows_of

from .ragged import deal, make

Floats = npt.NDArray[np.float32]
Pools = list[tuple[jax.Array, jax.Array]]
PAGE, POOL, DIM, SCALE = 4, 48, 8, 0.3
# Around every boundary of a page, and of a chunk of pages.
CONTEXTS = [1, PAGE - 1, PAGE, PAGE + 1, 31, 32, 33, 7]


def values(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def pools(kv_heads: int) -> tuple[Floats, Floats]:
    return values(POOL, PAGE, kv_heads, DIM, seed=1), values(POOL, PAGE, kv_heads, DIM, seed=2)


def dense(q: Floats, k_pool: Floats, v_pool: Floats, ragged: Ragged, scale: float = SCALE) -> npt.NDArray[np.float64]:
    """The formula, token by token, in float64."""
    out = np.zeros(q.shape)
    group = q.shape[1] // k_pool.shape[2]
    for token, row in enumerate(np.asarray(ragged.rows)):
        if row == len(ragged.starts):
            continue
        pages, seen = np.asarray(ragged.block_tables)[row], int(ragged.positions[token]) + 1
        k, v = (p[pages].reshape(-1, *p.shape[2:])[:seen].astype(np.float64) for p in (k_pool, v_pool))
        for head in range(q.shape[1]):
            score = scale * k[:, head // group] @ q[token, head].astype(np.float64)
            weight = np.exp(score - score.max())
            out[token, head] = weight @ v[:, head // group] / weight.sum()
    return out


@partial(jax.jit, static_argnames=("decode",))
def attend(q: Any, k_pool: Any, v_pool: Any, ragged: Ragged, decode: bool = False) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        return attention_xla.paged_attention(q, k_pool, v_pool, ragged, scale=SCALE, decode=decode)


def check(rows: list[tuple[int, int]], kv_heads: int, group: int, *, decode: bool = False, **padding: int) -> None:
    ragged = make(rows, deal(rows, page=PAGE, pool=POOL), page=PAGE, pool=POOL, **padding)
    q = values(len(ragged.rows), kv_heads * group, DIM)
    got = attend(q, *pools(kv_heads), ragged, decode)
    np.testing.assert_allclose(got, dense(q, *pools(kv_heads), ragged), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 2), (1, 4), (3, 8)])
def test_decode_equals_the_dense_twin(kv_heads: int, group: int) -> None:
    check([(1, c) for c in CONTEXTS], kv_heads, group, decode=True, padded_rows=11, tokens=11, width=16)


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (1, 2), (2, 4), (1, 8)])
def test_mixed_rows_equal_the_dense_twin(kv_heads: int, group: int) -> None:
    rows = [(5, 5), (1, 33), (4, 9), (1, 1), (PAGE, PAGE), (3, 40), (PAGE + 1, PAGE + 1), (2, 2)]
    check(rows, kv_heads, group, tokens=32, padded_rows=10, width=12)


@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 2, 3, 5]), st.sampled_from([0, 1, 3, 4, 5, 12])), min_size=1, max_size=9
    ),
    seed=st.integers(0, 9),
)
@settings(max_examples=40)
def test_any_step_equals_the_dense_twin(rows: list[tuple[int, int]], seed: int) -> None:
    """Rows of `length` new tokens after `past` old ones, in one program of 45 tokens and 12 rows."""
    steps = [(length, past + length if length else 0) for length, past in rows]
    ragged = make(
        steps, deal(steps, page=PAGE, pool=POOL, seed=seed), page=PAGE, pool=POOL, tokens=45, padded_rows=12, width=8
    )
    q = values(45, 4, DIM, seed=seed)
    np.testing.assert_allclose(attend(q, *pools(2), ragged), dense(q, *pools(2), ragged), atol=1e-5, rtol=0)


def test_a_prompt_longer_than_a_query_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_of, "QUERY_BLOCK", 16)
    monkeypatch.setattr(rows_of, "KEY_BLOCK", 8)
    jax.clear_caches()
    check([(50, 70), (17, 17), (1, 20)], 2, 2, tokens=71, width=32)  # 71: a last block reaches beyond the tokens
    jax.clear_caches()


def test_a_step_of_padding_only_gives_zeros() -> None:
    ragged = make([(0, 0)], [[]], page=PAGE, pool=POOL, tokens=3, padded_rows=3)
    for decode in (True, False):
        assert not np.any(attend(values(3, 4, DIM), *pools(2), ragged, decode))


def test_rows_may_share_pages() -> None:
    rows = [(1, 6), (1, 7), (2, 8)]
    ragged = make(rows, [[5, 9], [5, 3], [5, 9]], page=PAGE, pool=POOL)
    q = values(4, 4, DIM)
    np.testing.assert_allclose(attend(q, *pools(2), ragged), dense(q, *pools(2), ragged), atol=1e-5, rtol=0)


@pytest.mark.parametrize("length", [1, 3])
def test_a_row_does_not_depend_on_the_others(length: int) -> None:
    rows = [(length, 30), (1, 44), (6, 21), (1, 3)]
    tables = deal(rows, page=PAGE, pool=POOL)
    q = values(sum(n for n, _ in rows), 4, DIM)
    together = attend(q, *pools(2), make(rows, tables, page=PAGE, pool=POOL, width=16))
    alone = attend(q[:length], *pools(2), make(rows[:1], tables[:1], page=PAGE, pool=POOL, width=16))
    np.testing.assert_allclose(together[:length], alone, atol=1e-6, rtol=0)


def test_what_a_page_held_before_is_not_seen_even_if_nan() -> None:
    rows = [(1, 6), (3, 9), (1, 1)]
    ragged = make(rows, deal(rows, page=PAGE, pool=POOL), page=PAGE, pool=POOL, width=8)
    k, v = pools(2)
    q = values(5, 4, DIM)
    want = attend(q, k, v, ragged)
    seen = np.zeros((POOL, PAGE), bool)
    for (_, context), pages in zip(rows, np.asarray(ragged.block_tables), strict=True):
        at = np.arange(context)
        seen[pages[at // PAGE], at % PAGE] = True
    k[~seen], v[~seen] = np.nan, np.nan
    np.testing.assert_array_equal(attend(q, k, v, ragged), want)


def test_write_puts_tokens_in_their_pages_and_drops_padding() -> None:
    ragged = make([(3, 6), (1, 1)], [[7, 2], [4]], page=PAGE, pool=POOL, tokens=6)
    k, v = values(6, 2, DIM, seed=3), values(6, 2, DIM, seed=4)
    before = pools(2)
    after = jax.jit(attention_xla.write_kv)(*before, k, v, ragged)
    for pool, new, old in zip(after, (k, v), before, strict=True):
        want = old.copy()
        want[7, 3], want[2, 0], want[2, 1], want[4, 0] = new[0], new[1], new[2], new[3]
        np.testing.assert_array_equal(pool, want)


def test_reads_of_lower_precision_sum_in_float32() -> None:
    rows = [(1, 30), (5, 20)]
    ragged = make(rows, deal(rows, page=PAGE, pool=POOL), page=PAGE, pool=POOL)
    q, (k, v) = values(6, 4, DIM), pools(2)
    got = attend(*(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)), ragged)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), dense(q, k, v, ragged), atol=3e-2, rtol=0)


def test_shapes_that_do_not_fit_are_named() -> None:
    ragged = make([(1, 1), (1, 1)], [[1], [2]], page=PAGE, pool=POOL)
    with pytest.raises(ValueError, match=r"H a multiple of K"):
        attention_xla.paged_attention(jnp.zeros((2, 3, DIM)), *map(jnp.asarray, pools(2)), ragged, scale=1.0)
    with pytest.raises(ValueError, match="there are 3 tokens and 2 rows"):
        attend(values(3, 2, DIM), *pools(2), ragged, True)


@pytest.mark.parametrize("columns", [1, 5, 12, 16])
def test_a_short_block_table_does_not_make_it_copy_the_pool(columns: int) -> None:
    """Compiled memory tells: a table of one chunk once made XLA copy every pool at each decode step, for seconds."""
    pool, q = jnp.zeros((4096, 16, 2, 128)), jnp.zeros((1, 4, 128))
    ragged = make([(1, 8)], [[0]], page=16, pool=4096, width=columns)

    @partial(jax.jit, donate_argnums=1)
    def step(q: jax.Array, pools: Pools, ragged: Ragged) -> tuple[jax.Array, Pools]:
        filled = []
        for pool in pools:
            k, v = attention_xla.write_kv(*pool, q[:, :2], q[:, :2], ragged)
            q = attention_xla.paged_attention(q, k, v, ragged, scale=SCALE, decode=True)
            filled.append((k, v))
        return q, filled

    memory = step.lower(q, [(pool, pool)] * 2, ragged).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2**22, "a pool has 2**26 bytes"
