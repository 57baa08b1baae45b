"""RoPE and KV write: XLA against float64, and the kernels for Hopper and TPU against both."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic.spec import AttentionShape
from pallas_kernels.ops.kv_write.hopper import Config, candidates, heuristic, packed, rope_and_write
from pallas_kernels.ops.kv_write.tpu import write_kv
from tests.support.examples import cases
from tests.support.kernels import reference
from tests.support.kernels.checks.kv_write import (
    PAGE,
    QUANTISED,
    SHAPES,
    check,
    right,
    rope_and_write_xla,
    step,
)
from tests.support.kernels.interpreted import needs_interpreter
from tests.support.kernels.ragged import deal, make
from tests.support.kernels.tpu import races_found


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda x: jnp.dtype(x).name)
def test_the_twin_turns_and_writes_as_float64_does(dtype: Any) -> None:
    case = step(4, 2, 8, dtype)
    right(case, jax.jit(rope_and_write_xla)(*case.arguments))


@pytest.mark.parametrize("stored", QUANTISED, ids=lambda x: jnp.dtype(x).name)
def test_the_twin_quantizes_what_it_writes(stored: Any) -> None:
    case = step(4, 2, 8, stored=stored)
    assert case.scales is not None
    arguments = case.q, case.k, case.v, None, *case.pools, case.ragged
    _, k_pool, v_pool = jax.jit(rope_and_write_xla)(*arguments, scales=case.scales)
    pairs = ((k_pool, case.pools[0], case.k, case.scales.k), (v_pool, case.pools[1], case.v, case.scales.v))
    for got, before, new, scale in pairs:
        want = reference.written(before, reference.quantized(new, scale, stored), case.ragged.write)
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    assert np.all(np.isfinite(np.asarray(k_pool, np.float32))), "values out of range are clipped"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda x: jnp.dtype(x).name)
def test_the_twin_norms_heads_as_float64_does(dtype: Any) -> None:
    case = step(4, 2, 8, dtype, normed=True)
    right(case, jax.jit(rope_and_write_xla)(*case.arguments, norms=case.norms))


def test_the_twin_writes_in_place() -> None:
    pool = jax.ShapeDtypeStruct((4096, PAGE, 2, 8), jnp.float32)
    case = step(4, 2, 8, jnp.float32)
    program = jax.jit(rope_and_write_xla, donate_argnums=(4, 5))
    memory = program.lower(case.q, case.k, case.v, case.turn, pool, pool, case.ragged).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= 2 * 4 * 4096 * PAGE * 16
    assert memory.temp_size_in_bytes < 2**16


# Shape, dtype, normed, turned, tokens of a block: one of 3 does not divide 8 tokens, so it takes fewer.
BARE = [((4, 2, 64), "bfloat16", False, True, 2), ((8, 1, 128), "bfloat16", False, True, 2)]
BARE += [(shape, "bfloat16", True, turned, 2) for shape in ((4, 2, 64), (8, 1, 128)) for turned in (True, False)]
DTYPES, BOTH = ["bfloat16", "float16"], [True, False]
ROWS = [*product(SHAPES, DTYPES, [False], BOTH, [1, 3, 8]), *product(SHAPES, DTYPES, [True], [True], [1, 4])]


@needs_interpreter
@pytest.mark.parametrize(("shape", "dtype", "normed", "turned", "tokens"), cases(BARE, ROWS, apart=True), ids=str)
def test_the_kernel_norms_turns_and_writes_as_the_twin_does(
    shape: tuple[int, int, int], dtype: str, normed: bool, turned: bool, tokens: int
) -> None:
    check(step(*shape, jnp.dtype(dtype), normed=normed), turned=turned, config=Config(tokens))


@needs_interpreter
@pytest.mark.parametrize("stored", QUANTISED, ids=lambda x: jnp.dtype(x).name)
def test_the_kernel_quantizes_as_the_twin_does(stored: Any) -> None:
    check(step(4, 2, 64, stored=stored))


@pytest.mark.parametrize(
    ("spec", "config", "reason"),
    [
        (AttentionShape(1, 4, 2, 96, 64), Config(), "spec.dim=96 must be 64, 128 or 256"),
        (AttentionShape(1, 4, 2, 64, 64, dtype=jnp.float32), Config(), "must be bfloat16 or float16"),
        (AttentionShape(1, 4, 2, 64, 64, kv_dtype=jnp.uint8), Config(), "must be one of float8_e4m3fn, int8"),
        (AttentionShape(1, 4, 2, 64, 64), Config(17), "self.tokens=17 must be 1 to 16"),
    ],
    ids=["dim", "dtype", "stored", "tokens"],
)
def test_what_the_kernel_cannot_do_is_refused_by_name(spec: AttentionShape, config: Config, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        config.validate(spec)


def test_scales_and_the_dtype_of_the_pools_go_together() -> None:
    case = step(4, 2, 64, stored=jnp.int8)
    with pytest.raises(ValueError, match="pools of int8 and keys of bfloat16 need scales"):
        rope_and_write(packed(case.q, case.k, case.v), *case.arguments[3:])


def test_configs_are_valid_for_what_they_are_chosen_for() -> None:
    spec = AttentionShape(1, 32, 8, 128, 64)
    for tokens in (1, 7, 256, 8192):
        for config in (heuristic(tokens), *candidates(tokens)):
            config.validate(spec)
            assert config.tokens <= tokens


def test_tokens_land_on_their_pages_and_padding_nowhere() -> None:
    rows = [(3, 9), (1, 4), (0, 0), (5, 5)]
    ragged = make(rows, deal(rows, page=4, pool=12), page=4, pool=12, tokens=12, padded_rows=5)
    rng = np.random.default_rng(0)
    pools = [jnp.asarray(rng.standard_normal((12, 4, 2, 8)), jnp.bfloat16) for _ in "kv"]
    new = [jnp.asarray(rng.standard_normal((12, 2, 8)), jnp.float32) for _ in "kv"]
    interpret = pltpu.InterpretParams(detect_races=True)
    got = jax.jit(lambda *xs: write_kv(*xs, interpret=interpret))(*pools, *new, jax.tree.map(jnp.asarray, ragged))
    for after, pool, values in zip(got, pools, new, strict=True):
        np.testing.assert_array_equal(np.asarray(after), reference.written(pool, values, ragged.write))
    assert not races_found()
