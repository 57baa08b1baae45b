"""Pool rows of narrow heads on a TPU: alone, and in a layer's attention against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import tpu
from pallas_kernels.ops.paged_attention.api import AttentionInputs, AttentionSpec
from pallas_kernels.ops.paged_attention.tpu.lanes import Row, row_of
from tests.support.kernels import reference
from tests.support.kernels.ragged import deal, make

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
