"""Expert products of XLA and of the Hopper kernel against float64, and their plan, for any choice of experts."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.choice import Choice, Unsupported
from pallas_kernels.ops.grouped_matmul import api as experts
from pallas_kernels.ops.grouped_matmul import plan as planning
from pallas_kernels.ops.grouped_matmul.api import resolve_experts
from pallas_kernels.ops.grouped_matmul.hopper import matmul as grouped
from pallas_kernels.ops.grouped_matmul.hopper.matmul import Config, GroupedSpec, candidates, heuristic, plan
from pallas_kernels.ops.grouped_matmul.plan import plan_experts
from pallas_kernels.ops.grouped_matmul.xla import grouped_matmul as by_xla
from tests.support.examples import cases, examples, pairwise
from tests.support.kernels.checks.grouped_matmul import (
    CONFIGS,
    GATED,
    NARROW,
    ROUTES,
    by_pairs,
    check,
    check_narrow,
    formula,
    gated_formula,
    operands,
    swiglu,
)
from tests.support.kernels.interpreted import needs_interpreter
from tests.support.kernels.reference import error

H200 = experts.ExpertsSpec("bfloat16", 128, 2048, 768, platform="gpu", device="NVIDIA H200", capability="9.0")


ROWS = list(product(ROUTES, [1, 16], [0, 1, 4]))


@pytest.mark.parametrize(("route", "tile", "scales"), cases(pairwise(ROWS), ROWS, apart=True))
def test_xla_multiplies_each_row_with_its_own_expert(route: str, tile: int, scales: int) -> None:
    chosen = ROUTES[route]
    x, weight = operands(len(chosen), 8, 12, jnp.float32)
    planned = jax.jit(plan_experts, static_argnames=("experts", "tile"))  # one program instead of one per operation
    work = planned(jnp.array(chosen), experts=3, tile=tile)
    scale, wide = None, weight
    if scales:
        weight = jnp.round(weight * 40).astype(jnp.int8)
        scale = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2.0, (3, scales, 12)), jnp.float32)
        wide = np.asarray(weight, np.float64) * np.repeat(np.asarray(scale, np.float64), 8 // scales, axis=1)
    got = jax.jit(lambda *args: by_xla(*args, tile=tile, scale=scale))(x[work.source], weight, work)
    assert error(by_pairs(got, work), formula(x, wide, chosen)) < 1e-5


# Config, route, dtype of operands and of results, gated or not.
USUAL: list[tuple[Any, ...]] = [
    ("swapped", "a tile and one more", "bfloat16", "float32", False),
    ("straight", "all to one", "bfloat16", "float32", False),
    ("swapped narrow", "elsewhere", "bfloat16", "float32", False),
    ("swapped", "a tile and one more", "bfloat16", "bfloat16", True),
    ("straight", "elsewhere", "bfloat16", "bfloat16", True),
]
FORMS = [(one, route, dtype, dtype, False) for one, route, dtype in product(CONFIGS, ROUTES, ["float16", "bfloat16"])]
FORMS += [(one, route, "float16", "float32", True) for one, route in product(GATED, ROUTES)]


@needs_interpreter
@pytest.mark.parametrize(("config", "route", "dtype", "result", "gated"), cases(USUAL, FORMS, apart=True))
def test_the_kernel_multiplies_each_row_with_its_own_expert(
    config: str, route: str, dtype: str, result: str, gated: bool
) -> None:
    check(CONFIGS[config], ROUTES[route], jnp.dtype(dtype), jnp.dtype(result), gated=gated)


# Config, route, stored dtype, scales, dtype of operands and of results, gated or not.
NARROW_USUAL: list[tuple[Any, ...]] = [
    ("decode", "elsewhere", "int8", 2, "bfloat16", "float32", False),
    ("deep", "a tile and one more", "float8_e4m3fn", 1, "bfloat16", "float32", False),
    ("decode", "a tile and one more", "int8", 2, "bfloat16", "bfloat16", True),
    ("deep", "a tile and one more", "int8", 1, "bfloat16", "bfloat16", True),
]
TYPES = product(NARROW, ["int8", "float8_e4m3fn"], ["bfloat16", "float16"], [1, 2])
PAIRS = [("int8", "bfloat16", 2), ("float8_e4m3fn", "float16", 1)]
NARROW_FORMS = [(one, "one each", stored, scales, dtype, "float32", False) for one, stored, dtype, scales in TYPES]
NARROW_FORMS += [
    (one, route, stored, scales, dtype, dtype, False)
    for one, route, (stored, dtype, scales) in product(NARROW, ROUTES, PAIRS)
]


@needs_interpreter
@pytest.mark.parametrize(
    ("config", "route", "stored", "scales", "dtype", "result", "gated"),
    cases(NARROW_USUAL, NARROW_FORMS, apart=True),
)
def test_the_kernel_multiplies_by_weights_of_8_bits(
    config: str, route: str, stored: str, scales: int, dtype: str, result: str, gated: bool
) -> None:
    types = map(jnp.dtype, (dtype, result))
    check_narrow(NARROW[config], ROUTES[route], jnp.dtype(stored), scales, *types, gated=gated)


@pytest.mark.parametrize("tile", [1, 16])
def test_xla_applies_the_gate_to_the_halves(tile: int) -> None:
    chosen = ROUTES["elsewhere"]
    x, weight = operands(len(chosen), 8, 12, jnp.float32)
    by = experts.XlaExperts(tile)
    work = by.plan(jnp.array(chosen), 3)
    got = jax.jit(lambda *args: by(*args, gate=swiglu))(x[work.source], weight, work)
    assert error(by_pairs(got, work), gated_formula(formula(x, weight, chosen))) < 1e-5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rows": 24}, "self.rows=24 must be 8, 16, 32, 64 or 128"),
        ({"swapped": False, "rows": 64}, "self.rows=64 must be 64 or 128 for each of self.consumers=2"),
        ({"columns": 96}, "self.columns=96 must be 64, 128, 192 or 256 and divide"),
        ({"columns": 64}, "self.columns=64 a multiple of 64 for each of self.consumers=2"),
        ({"consumers": 3}, "self.consumers=3 must be 1 or 2"),
        ({"stages": 0}, "self.stages=0"),
        ({"stages": 20}, "bytes of shared memory; the limit is"),
        ({"rows": 256, "columns": 256, "swapped": False, "stages": 1}, "sums per warpgroup"),
        ({"depth": 128}, "self.depth=128 must be 64"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    refused(Config(8, 128, 4, 2, True), GroupedSpec(64, 8, 256, 256), changes, reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rows": 128, "columns": 256, "swapped": False}, "must be swapped for 8-bit weights"),
        ({"consumers": 1}, "with columns=128, consumers=2"),
        ({"stages": 1}, "at least 2 stages"),
        ({"depth": 96}, "self.depth=96 must be 64 or 128"),
        ({"depth": 128}, "divide spec.width=256 / spec.scales=4"),
        ({"stages": 12, "rows": 128}, "bytes of shared memory; the limit is"),
    ],
)
def test_a_config_that_cannot_be_with_8_bits_is_refused(changes: dict[str, Any], reason: str) -> None:
    refused(Config(8, 128, 4, 2, True), GroupedSpec(64, 8, 256, 256, stored=jnp.int8, scales=4), changes, reason)


def refused(config: Config, spec: GroupedSpec, changes: dict[str, Any], reason: str) -> None:
    config.validate(spec)
    with pytest.raises(ValueError) as caught:
        replace(config, **changes).validate(spec)
    assert re.search(reason, str(caught.value))


def test_what_does_not_fit_is_refused() -> None:
    spec = GroupedSpec(64, 8, 256, 256)
    for changes, reason in (({"width": 40}, "spec.width=40"), ({"dtype": jnp.float32}, "must be bfloat16 or float16")):
        assert reason in (grouped.supports(replace(spec, **changes)) or "")
    x, weight = operands(4, 128, 128, jnp.float16)
    work = plan(jnp.zeros(4, jnp.int32), 3, 8)
    with pytest.raises(ValueError, match="do not match"):
        grouped.grouped_matmul(x, weight, work, config=CONFIGS["swapped"])
    with pytest.raises(ValueError, match=r"int8\(3, 128, 128\), scales \(2, 1, 128\) and 40 rows do not match"):
        scale = jnp.ones((2, 1, 128))
        grouped.grouped_matmul(x[work.source], weight.astype(jnp.int8), work, scale=scale, config=NARROW["decode"])


@pytest.mark.parametrize("sizes", [(128, 2048, 768), (32, 2880, 2880), (64, 2048, 1408), (256, 3072, 1536)])
@pytest.mark.parametrize("pairs", [1, 8, 512, 2048, 65536])
def test_there_are_configs_for_what_is_served(sizes: tuple[int, int, int], pairs: int) -> None:
    count, dim, ff_dim = sizes
    for width, outputs in ((dim, 2 * ff_dim), (ff_dim, dim)):
        spec = GroupedSpec(pairs, count, width, outputs)
        heuristic(spec).validate(spec)
        assert heuristic(spec).rows == grouped.tile_of(pairs, count) and heuristic(spec).stages > 2
        for stored, scales in ((jnp.int8, 1), (jnp.float8_e4m3fn, width // gcd(width, 128))):
            if outputs % 128 == 0:
                narrow = replace(spec, stored=stored, scales=scales)
                heuristic(narrow).validate(narrow)
                assert heuristic(narrow).rows == heuristic(spec).rows and heuristic(narrow).stages > 2
    assert len({one.swapped for one in candidates(GroupedSpec(512, 128, 2048, 1536))}) == 2
    assert len({one.depth for one in candidates(GroupedSpec(512, 128, 2048, 1536, stored=jnp.int8))}) == 2


def test_the_choice_is_told_with_its_reasons() -> None:
    assert resolve_experts(H200) == Choice("mosaic_gpu", H200)
    assert resolve_experts(replace(H200, platform="cpu")) == Choice("xla", replace(H200, platform="cpu"))
    assert resolve_experts(replace(H200, platform="tpu")).backend == "xla"
    for weights, block in (("int8", 0), ("float8_e4m3fn", 0), ("float8_e4m3fn", 128)):
        assert resolve_experts(replace(H200, weights=weights, block=block)).backend == "mosaic_gpu"
    for changes, reason in (
        ({"capability": "8.0"}, "it needs Hopper"),
        ({"dtype": "float32"}, "must be bfloat16 or float16"),
        ({"ff_dim": 100}, "multiples of 64"),
        ({"weights": "uint8"}, "must be one of int8, float8_e4m3fn"),
        ({"weights": "int8", "dim": 2112}, "spec.outputs=2112 must be a multiple of 128 for 8-bit weights"),
        ({"weights": "int8", "dim": 2048, "block": 96}, "divide spec.width=2048 / spec.scales=64"),
    ):
        choice = resolve_experts(replace(H200, **changes))
        assert choice.backend == "xla" and reason in choice.refusals[0][1]
        with pytest.raises(Unsupported, match=r"experts backend 'mosaic_gpu' cannot run here: .*; allowed: auto, xla"):
            resolve_experts(replace(H200, **changes), "mosaic_gpu")
    with pytest.raises(Unsupported, match="experts backend 'tpu' is unknown; allowed: auto, mosaic_gpu, xla"):
        resolve_experts(H200, "tpu")


@settings(max_examples=examples(25), deadline=None)
@given(
    chosen=st.lists(st.integers(-1, 5), min_size=1, max_size=40),
    experts=st.sampled_from([1, 5]),
    shape=st.sampled_from([(1, 1), (4, 1), (8, 8), (16, 8)]),
    pairwise=st.booleans(),
)
def test_every_pair_is_computed_once(chosen: list[int], experts: int, shape: tuple[int, int], pairwise: bool) -> None:
    tile, align = shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "PAIRWISE", len(chosen) if pairwise else 0)
        work = plan_experts(np.array(chosen, np.int32), experts=experts, tile=tile, align=align)
    got = planning.Groups(*(np.asarray(part) for part in work))
    rows = len(got.source)
    covered = np.zeros(rows, np.int32)
    used = int(got.used[0])
    for expert, begin, count in zip(got.expert[:used], got.begin[:used], got.length[:used], strict=True):
        assert 1 <= count <= tile and begin % align == 0 and begin + tile <= rows
        covered[begin : begin + count] += 1
        assert (got.owner[begin : begin + count] == expert).all()
    assert (np.diff(got.begin[:used]) > 0).all()
    for pair, (expert, place) in enumerate(zip(chosen, got.place, strict=True)):
        if 0 <= expert < experts:
            assert got.source[place] == pair and got.owner[place] == expert and covered[place] == 1
        else:
            assert place == rows
    real = [e for e in chosen if 0 <= e < experts]
    assert covered.sum() == len(real) and covered.max(initial=0) <= 1
    assert (got.sizes == np.bincount(real, minlength=experts)).all() and (got.starts % align == 0).all()
    # In step order: a row's result does not depend on it, but it makes repeated steps identical.
    for e in range(experts):
        places = [int(p) for p, c in zip(got.place, chosen, strict=True) if c == e]
        assert places == sorted(places)


def test_a_tile_that_groups_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="tile=12 must be a positive multiple of align=8"):
        plan_experts(np.zeros(3, np.int32), experts=2, tile=12, align=8)
