"""Prefill attention for Hopper in the interpreter, against float64, with race detection if available."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layout import Scales
from pallas_kernels.mosaic.spec import SMEM, AttentionShape
from pallas_kernels.ops.paged_attention.hopper.prefill import Config, candidates, heuristic, paged_prefill, supports
from tests.support.kernels.checks.decode import compute
from tests.support.kernels.checks.prefill import (
    CASES,
    MIXED,
    SMALL,
    Problem,
    check,
)
from tests.support.kernels.interpreted import needs_interpreter, without_races


@needs_interpreter
def test_a_mix_of_chunks_equals_the_dense_twin_without_races() -> None:
    check(Problem(padded=3), SMALL)


@needs_interpreter
def test_pools_of_8_bits_are_widened_without_races() -> None:
    check(Problem(heads=4, kv_heads=2, stored=jnp.int8), SMALL)


@needs_interpreter
@pytest.mark.parametrize("k_factor", [0.0, 1e-35, 1e3])
def test_key_scales_of_any_size(k_factor: float) -> None:
    check(Problem(rows=((20, 70),), stored=jnp.float8_e4m3fn, k_factor=k_factor), SMALL)


@needs_interpreter
@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_twin_without_races(name: str) -> None:
    check(*CASES[name])


@needs_interpreter
@pytest.mark.full
def test_a_row_does_not_depend_on_the_others() -> None:
    together, _ = compute(Problem(), SMALL, paged_prefill)
    row = Problem(rows=MIXED[:1], tables=(tuple(Problem().dealt[0]),))
    # The same values: the first row's tokens come first, and the pools are drawn after q.
    q, k, v, _ = Problem().arrays()
    ragged = jax.tree.map(jnp.asarray, row.ragged())
    work = SMALL.plan(ragged, page=16)
    with without_races() as interpret:
        alone, _ = jax.block_until_ready(
            paged_prefill(q[:40], k, v, ragged, work, scale=row.scale, config=SMALL, interpret=interpret)
        )
    np.testing.assert_array_equal(alone, together[:40])


MODELS = [(32, 8, 128), (8, 2, 128), (16, 2, 128), (40, 8, 128), (24, 8, 128), (16, 16, 64), (8, 1, 128), (16, 8, 256)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), MODELS)
@pytest.mark.parametrize("page", [16, 64, 128, 256])
def test_heuristic_and_candidates_fit_the_block(heads: int, kv_heads: int, dim: int, page: int) -> None:
    spec = AttentionShape(64, heads, kv_heads, dim, page)
    assert supports(spec) is None
    found = list(candidates(spec))
    assert found[0] == heuristic(spec)
    assert len(set(found)) == len(found) > 4
    for config in (*found, heuristic(spec, window=100)):
        config.validate(spec)
        assert config.smem_bytes(spec) <= SMEM


def test_what_is_not_supported_is_named() -> None:
    spec = AttentionShape(64, 32, 8, 128, 64)
    for change, reason in (
        ({"kv_dtype": jnp.int8, "dim": 256}, "only one tile of keys fits"),
        ({"kv_dtype": jnp.float16}, "must be float8_e4m3fn, int8 or"),
        ({"page": 48}, "must be 64 or 128, and a multiple or a divisor of spec.page=48"),
        ({"page": 12}, "spec.page=12 must be a multiple of 8"),
        ({"dim": 192}, "spec.dim=192 must be 64, 128 or 256"),
        ({"kv_heads": 5}, "spec.heads=32 must be a multiple of spec.kv_heads=5"),
        ({"dtype": jnp.float32}, "must be bfloat16 or float16"),
    ):
        refused = supports(replace(spec, **change))
        assert refused is not None
        assert reason in refused
    with pytest.raises(ValueError, match=r"self.heads=8 must be 1, 2, 4 or 8 and divide the 4 query heads"):
        Config(heads=8).validate(spec)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        Config(heads=4, stages=3).validate(spec)


@pytest.mark.parametrize("stored", [None, jnp.int8])
def test_scales_go_with_pools_of_8_bits(stored: Any) -> None:
    problem, one = Problem(stored=stored), jnp.ones(1)
    scales = Scales(one, one) if stored is None else None
    ragged = problem.ragged()
    work = jax.eval_shape(partial(SMALL.plan, page=16), ragged)
    with pytest.raises(ValueError, match="8-bit pools need scales, others take none"):
        paged_prefill(*problem.arrays()[:3], ragged, work, scale=1.0, scales=scales, config=SMALL)
