"""Attention that reads shared prefixes once: its plan, XLA and the Hopper kernel against float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.layout import Ragged, Scales, SharedPrefixes
from pallas_kernels.ops.paged_attention import cascade
from pallas_kernels.ops.paged_attention.sinks import with_sinks
from pallas_kernels.ops.paged_attention.xla import paged_attention_lse
from tests.support.examples import examples
from tests.support.kernels import reference
from tests.support.kernels.checks.cascade import CHUNKS, DECODES, DRAFTS, PREFIXES, Problem, check, check_shared
from tests.support.kernels.checks.decode import SMALL
from tests.support.kernels.interpreted import needs_interpreter
from tests.support.kernels.ragged import make

PAGE, POOL, DIM, SCALE, WIDTH, GROUPS = 4, 96, 8, 0.3, 14, 3
ROWS, TOKENS = 12, {True: 12, False: 80}  # of the programs: fixed, so that few are compiled
HEADS = (2, 2)  # K, G


class Case(NamedTuple):
    """A step with groups."""

    ragged: Ragged
    groups: tuple[int, ...]  # of each row, 0: none


@st.composite
def steps(draw: st.DrawFn, decode: bool) -> Case:
    """Draw rows of which some begin with the pages of a group. Tokens of a step come after these pages."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    prefixes = draw(st.lists(st.integers(1, 8), min_size=GROUPS, max_size=GROUPS))
    free = list(1 + rng.permutation(POOL - 1))
    heads = [[int(free.pop()) for _ in range(pages)] for pages in prefixes]
    rows, tables, groups = [], [], []
    for _ in range(draw(st.integers(1, ROWS))):
        group = draw(st.integers(0, GROUPS))
        length = 1 if decode else draw(st.sampled_from([1, 1, 2, 6]))
        shared = heads[group - 1] if group else []
        context = len(shared) * PAGE + length + draw(st.integers(0, 2 * PAGE))
        own = -(-context // PAGE) - len(shared)
        rows.append((length, context))
        tables.append([*shared, *(int(free.pop()) for _ in range(own))])
        groups.append(group)
    ragged = make(rows, tables, page=PAGE, pool=POOL, padded_rows=ROWS, tokens=TOKENS[decode], width=WIDTH)
    if decode:
        ragged = ragged._replace(starts=np.arange(ROWS, dtype=np.int32))
    leaders = [next((row for row, one in enumerate(groups) if one == g + 1), 0) for g in range(GROUPS)]
    pages = np.array([size if g + 1 in groups else 0 for g, size in enumerate(prefixes)], np.int32)
    named = np.array([*groups, *[0] * (ROWS - len(rows))], np.int32)
    shared = SharedPrefixes(named, np.array(leaders, np.int32), pages, pages * PAGE)
    return Case(ragged._replace(shared=shared), tuple(groups))


planned = jax.jit(cascade.plan, static_argnames=("queries", "longest", "window"))


@pytest.mark.parametrize(("queries", "longest", "window"), [(16, None, 9), (3, 2, None), (1, 1, 40)])
@settings(max_examples=examples(60))
@given(data=st.data())
def test_each_query_of_a_group_is_in_one_tile_of_it(
    data: st.DataObject, queries: int, longest: int | None, window: int | None
) -> None:
    ragged, groups = data.draw(steps(False))
    work = jax.tree.map(np.asarray, planned(ragged, queries=queries, longest=longest, window=window))
    assert ragged.shared is not None
    fits = (ragged.contexts <= (window or np.inf)) & (ragged.lengths <= (longest or np.inf))
    mine = np.append(np.where(fits, ragged.shared.group, 0), 0)[ragged.rows]
    found: dict[int, tuple[int, int]] = {}
    assert work.used == np.count_nonzero(work.tiles.lengths) and np.all(work.tiles.lengths[: work.used])
    for tile in range(work.used):
        start, length = work.tiles.starts[tile], work.tiles.lengths[tile]
        assert 0 < length <= queries and np.all(work.tiles.rows[start : start + length] == tile)
        leader = next(row for row in range(len(groups)) if mine[ragged.starts[row]] == mine[work.order[start]])
        pages = ragged.shared.pages[mine[work.order[start]] - 1]
        np.testing.assert_array_equal(work.tiles.block_tables[tile, :pages], ragged.block_tables[leader, :pages])
        assert work.tiles.contexts[tile] == pages * PAGE
        found |= {token: (start + at, mine[token]) for at, token in enumerate(work.order[start : start + length])}
        assert len({mine[token] for token in work.order[start : start + length]}) == 1
    assert {token: (work.place[token], mine[token]) for token in np.flatnonzero(mine)} == found
    assert np.all(work.place[mine == 0] == len(work.order))
    assert len(found) == np.count_nonzero(work.tiles.rows < len(work.tiles.lengths))


@partial(jax.jit, static_argnames=("decode", "window", "softcap", "heads_first"))
def attend(q: Any, k: Any, v: Any, ragged: Ragged, *, window: int | None, decode: bool, **options: Any) -> Any:
    """Return cascade attention and plain attention."""
    if options.get("heads_first"):
        k, v = (jnp.swapaxes(pool, 1, 2) for pool in (k, v))
    options |= {"scale": SCALE, "window": window, "decode": decode}
    size = cascade.queries(len(q), decode=decode)
    work = cascade.plan(ragged, queries=size, window=window)
    with jax.default_matmul_precision("highest"):
        plain = paged_attention_lse(q, k, v, ragged, **options)
        return cascade.cascade_attention(q, k, v, work, **options), plain


def values(seed: int, *shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# Decode or not, window, softcap, dtype of the pools, heads first. Each rule is a program, which takes seconds.
RULES = [
    (True, None, None, None, True),
    (False, 40, 1.5, None, False),
    (True, 9, None, jnp.int8, False),
    (False, None, None, jnp.int8, True),
    (True, 40, 1.5, None, False),
    (False, 9, None, None, True),
]
MARKED = [*RULES[:3], *(pytest.param(*rule, marks=pytest.mark.full) for rule in RULES[3:])]


@pytest.mark.parametrize(("decode", "window", "softcap", "stored", "first"), MARKED, ids=str)
@settings(max_examples=examples(60))
@given(data=st.data())
def test_cascade_equals_plain_attention(
    data: st.DataObject, decode: bool, window: int | None, softcap: float | None, stored: Any, first: bool
) -> None:
    ragged, groups = data.draw(steps(decode))
    kv_heads, group = HEADS
    q = values(0, TOKENS[decode], kv_heads * group, DIM)
    k, v = values(1, POOL, PAGE, kv_heads, DIM), values(2, POOL, PAGE, kv_heads, DIM)
    scales = None
    if stored is not None:
        scales = Scales(*(np.linspace(low, 0.03, kv_heads, dtype=np.float32) for low in (0.01, 0.02)))
        k, v = (reference.quantized(x, scale, stored) for x, scale in zip((k, v), scales, strict=True))
    options: Any = {"window": window, "softcap": softcap, "scales": scales}
    (out, lse), plain = attend(q, k, v, ragged, decode=decode, heads_first=first, **options)
    want, want_lse = reference.attention(q, k, v, ragged, scale=SCALE, **options)
    np.testing.assert_allclose(out, want, atol=2e-5, rtol=0)
    np.testing.assert_allclose(lse, want_lse, atol=2e-5, rtol=1e-6)
    sinks = values(3, kv_heads * group)
    kept = np.exp(-np.logaddexp(0, sinks[None] - want_lse))
    np.testing.assert_allclose(with_sinks(out, lse, sinks), want * kept[..., None], atol=2e-5, rtol=0)
    alone = np.array([row >= len(groups) or not groups[row] for row in ragged.rows])
    for got, bits in zip((out, lse), plain, strict=True):
        np.testing.assert_array_equal(np.asarray(got)[alone], np.asarray(bits)[alone])


BODIES = [False, pytest.param(True, marks=needs_interpreter)]


@needs_interpreter
def test_queries_of_one_group_see_all_shared_keys() -> None:
    check_shared(Problem(PREFIXES, DECODES[2:], decode=True), replace(SMALL, queries=3))


@pytest.mark.full
@pytest.mark.parametrize("warps", BODIES)
@pytest.mark.parametrize(
    ("options", "queries"),
    [
        ({}, 16),
        ({"softcap": 2.0}, 7),
        ({"window": 75}, 16),
        ({"dim": 128, "heads": 16}, 8),
        ({"dim": 256, "heads": 2}, 16),
        ({"dtype": jnp.float16, "page": 64, "rows": ((1, 3, 300), (1, 1, 260), (2, 2, 131))}, 16),
        ({"stored": jnp.int8}, 8),
        ({"stored": jnp.float8_e4m3fn, "dim": 128, "softcap": 2.0}, 4),
    ],
    ids=str,
)
def test_tiles_of_several_rows(options: dict[str, Any], queries: int, warps: bool) -> None:
    check_shared(Problem(PREFIXES, **{"rows": DRAFTS, **options}), replace(SMALL, warps=warps, queries=queries))


@pytest.mark.full
@needs_interpreter
@pytest.mark.parametrize(
    "problem",
    [
        Problem(PREFIXES, DECODES, decode=True),
        Problem(PREFIXES, DRAFTS, few=True, softcap=2.0),
        Problem(PREFIXES, CHUNKS),
        Problem(PREFIXES, CHUNKS, window=75, sinks=True),
        Problem(PREFIXES, CHUNKS, stored=jnp.float8_e4m3fn),
        Problem(PREFIXES, DECODES, decode=True, stored=jnp.int8),
        Problem(PREFIXES, CHUNKS, dim=256, heads=2, stored=jnp.int8, window=75),  # prompts are left to XLA
    ],
    ids=str,
)
def test_a_layer_equals_plain_attention(problem: Problem) -> None:
    check(problem)
