"""Shared prefixes of the Hopper kernels in the interpreter, against float64, with race detection if available."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from tests.support.kernels.checks.cascade import CHUNKS, DECODES, DRAFTS, PREFIXES, Problem, check, check_shared
from tests.support.kernels.checks.decode import SMALL
from tests.support.kernels.interpreted import needs_interpreter

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
