"""Latent attention (MLA) for Hopper in the interpreter, against float64, and the slices that rows are cut into."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.mosaic.spec import SMEM, AttentionShape
from pallas_kernels.ops.mla import hopper as latent
from pallas_kernels.ops.mla.hopper import Config, candidates, heuristic
from pallas_kernels.ops.mla.plan import most_slices, sliced
from tests.support.examples import examples
from tests.support.kernels.checks.mla import BYTES, EDGES, EIGHT, FEW, SMALL, Problem, check
from tests.support.kernels.interpreted import needs_interpreter
from tests.support.kernels.ragged import deal, make


@needs_interpreter
@pytest.mark.parametrize("config", [SMALL, FEW])
def test_rows_around_pages_and_tiles(config: Config) -> None:
    check(Problem(EDGES, padded=1), config)


@needs_interpreter
@pytest.mark.parametrize("config", [replace(SMALL, queries=16), replace(FEW, queries=4)])
def test_a_prompt_is_cut_and_attended_to_beside_rows_of_one_token(config: Config) -> None:
    check(Problem(((1, 150), (19, 150), (3, 66)), padded=1), config)


@needs_interpreter
def test_rows_of_latents_of_8_bits_around_pages_and_tiles() -> None:
    check(Problem(((1, 1), (1, 64), (0, 0), (1, 65), (1, 300)), stored=jnp.int8, padded=1), EIGHT)


LONG = ((1, 200), (1, 300), (1, 3))
WINDOWED = ((1, 200), (3, 70), (2, 2))
BYTE_FORMS = [
    ({}, EIGHT),
    ({}, replace(EIGHT, tile=64, stages=4)),
    ({"rows": ((1, 150), (19, 150), (3, 66))}, replace(EIGHT, queries=4)),
    ({"page": 16, "rows": ((1, 15), (1, 16), (1, 17), (1, 130))}, replace(EIGHT, tile=64, stages=4)),
    ({"page": 256}, EIGHT),
    ({"heads": 16}, EIGHT),
    ({"heads": 32}, EIGHT),
    ({"heads": 5, "rows": ((3, 20), (1, 130))}, replace(EIGHT, queries=3)),
    ({"values": 512, "rows": ((1, 20), (1, 140))}, EIGHT),
    ({"values": 384, "rows": ((1, 140),)}, EIGHT),
    ({"rows": WINDOWED, "window": 30, "softcap": 5.0}, replace(EIGHT, queries=3)),
    ({"rows": LONG, "dtype": jnp.float16}, replace(EIGHT, workers=3)),
    ({"rows": LONG}, replace(EIGHT, workers=1)),
]
FORMS = [  # problem, changes of the config
    *(
        (Problem(((1, page - 1), (1, page), (1, min(page + 1, 200)), (1, 130)), page=page), {})
        for page in (16, 128, 256)
    ),
    *(
        (Problem(((some, 20), (1, 130)), heads=heads), {"queries": some})
        for heads, some in ((1, 1), (5, 3), (16, 1), (16, 4), (32, 1), (128, 1), (96, 1))
    ),
    (Problem(((1, 20), (1, 140)), values=512), {}),  # as wide as those of DeepSeek
    *(
        (Problem(WINDOWED, window=window, softcap=softcap), {"queries": 3})
        for window, softcap in ((1, None), (30, 5.0), (None, 1.0))
    ),
    *(
        (Problem(LONG, dtype=dtype), {"workers": workers, "stages": stages})
        for workers, stages, dtype in ((1, 4, jnp.float16), (3, 2, jnp.float16), (1, 2, jnp.bfloat16))
    ),
]


@needs_interpreter
@pytest.mark.full
@pytest.mark.parametrize("stored", BYTES)
@pytest.mark.parametrize(("changes", "config"), BYTE_FORMS, ids=str)
def test_latents_of_8_bits(changes: dict[str, Any], config: Config, stored: Any) -> None:
    check(replace(Problem(EDGES, stored=stored), **changes), config)


@pytest.mark.full
@needs_interpreter
@pytest.mark.parametrize("config", [SMALL, FEW])
@pytest.mark.parametrize(("problem", "changes"), FORMS, ids=str)
def test_latents_of_16_bits(problem: Problem, changes: dict[str, Any], config: Config) -> None:
    if config.warps and problem.heads * changes.get("queries", 1) > latent.FEW:
        pytest.skip("warp-level products have 16 rows")
    check(problem, replace(config, **changes))


@needs_interpreter
def test_weights_that_are_read_before_they_are_written_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the test: two warpgroups that do not wait for each other's weights are caught."""
    from pallas_kernels.ops.mla import hopper as latent_body

    met = latent_body._meet
    monkeypatch.setattr(latent_body, "_meet", lambda s, which: met(s, which) if which == 0 else None)
    with pytest.raises(AssertionError, match="races"):
        check(Problem(((1, 200),)), replace(SMALL, workers=1))


LITE = AttentionShape(rows=8, heads=16, kv_heads=1, dim=576, page=64, values=512)


@pytest.mark.parametrize(
    ("config", "changes", "why"),
    [
        (Config(), {"kv_heads": 2}, "spec.kv_heads=2 must be 1"),
        (Config(), {"heads": 97}, "spec.heads=97 must split evenly into the fewest blocks of at most 64"),
        (Config(), {"dim": 640}, "spec.dim=640 must be 64 more"),
        (Config(), {"values": 500}, "spec.values=500 must be a multiple of 128"),
        (Config(), {"page": 12}, "spec.page=12"),
        (Config(tile=64), {}, "self.tile=64 must be one of"),
        (Config(stages=3), {}, "self.stages=3 must be a multiple of 2"),
        (Config(queries=5), {}, "self.queries=5 times 16 heads must be 1 to 64 rows"),
        (Config(), {"dtype": jnp.float32}, "must be bfloat16 or float16"),
        (Config(), {"kv_dtype": jnp.float32}, "spec.kv_dtype=.* must be float8_e4m3fn, int8 or"),
        (Config(), {"kv_dtype": jnp.int8}, "self.warps=False must be True for .*int8"),
        (Config(warps=True), {"kv_dtype": jnp.int8, "heads": 17}, "spec.heads=17 must split evenly"),
        (Config(warps=True, tile=32), {"kv_dtype": jnp.int8}, "self.tile=32 must be one of"),
        (Config(warps=True, queries=2), {"kv_dtype": jnp.int8}, "self.queries=2 times 16 heads must be 1 to 16 rows"),
        (Config(stages=8), {}, "bytes of shared memory"),
    ],
)
def test_configs_that_cannot_be_are_named(config: Config, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        config.validate(replace(LITE, **changes))


@pytest.mark.parametrize("heads", [1, 4, 8, 16, 20, 32, 64, 128])
@pytest.mark.parametrize("queries", [1, 2, 16, 64])
@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("stored", [jnp.bfloat16, jnp.int8])
def test_heuristics_and_candidates_fit(heads: int, queries: int, page: int, stored: Any) -> None:
    spec = replace(LITE, heads=heads, queries=queries, page=page, kv_dtype=stored)
    found = list(candidates(spec))
    assert found[0] == heuristic(spec)
    for config in found:
        config.validate(spec)
        assert config.smem_bytes(spec) <= SMEM


SLICE_PAGE = 4


cut_into = jax.jit(sliced, static_argnames="queries")  # all steps have one shape, so five programs


@settings(deadline=None, max_examples=examples(30))
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=4), st.integers(1, 5))
def test_every_token_is_in_one_slice_of_its_row(drawn: list[tuple[int, int]], queries: int) -> None:
    rows = [(length, length + before if length else 0) for length, before in drawn]
    tables = deal(rows, page=SLICE_PAGE, pool=40)
    ragged = make(rows, tables, page=SLICE_PAGE, pool=40, tokens=37, padded_rows=5, width=6)
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
        sliced(make([(1, 1)], [[1]], page=SLICE_PAGE, pool=4), 0)
