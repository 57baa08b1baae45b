"""The law of tokens with an 8-bit KV cache: meshes, chunks, small pools and migration change no token.

In float32, against the request alone with the same kind of cache; the model with the int8 cache has
int8 weights too. Another order of summation may round a stored value to its neighbor in 8 bits, so
scores closer than `CLOSE` may swap.
"""

from __future__ import annotations

from functools import cache

import pytest

from jaxserve.models import registry
from tests.support.examples import cases
from tests.support.parity.asks import ROOMY, asks
from tests.support.parity.families import FAMILIES, SIZES
from tests.support.parity.law import LENGTH, PAGE, SPEC, Model, Setup, hold

CLOSE = 0.05
TIGHT = LENGTH // PAGE + 4
KINDS = ("fp8", "int8")
# Its cache has a scale for each column. No experts, which compile slowly and have a law of their own.
LATENT = registry.spec_from_config(
    {**SIZES, **FAMILIES["DeepseekV2"], "first_k_dense_replace": 2, "architectures": ["DeepseekV2ForCausalLM"]}
)
SHAPES = (("1x1", 16, TIGHT), ("2x1", 16, TIGHT), ("2x2", 64, ROOMY), ("4x2", 64, TIGHT), ("1x8", 256, ROOMY))
EVERY = [(kind, *shape, False) for kind in KINDS for shape in SHAPES]


FEWER = [case for case in EVERY if case[1:4] in SHAPES[1:4]]
KINDS_OF_CACHE = [
    *cases([("pairs", "fp8", "2x1", 16, TIGHT, True)], [("pairs", *case) for case in EVERY], apart=True),
    *cases([("latent", "fp8", "2x1", 64, TIGHT, True)], [("latent", *case) for case in FEWER], apart=True),
]


@cache
def model(kind: str, cache: str = "pairs") -> Model:
    pairs = SPEC.quantized_as("int8") if kind == "int8" else SPEC
    return Model(LATENT if cache == "latent" else pairs, close=CLOSE, kv=kind)


@pytest.mark.parametrize(("cache", "kind", "mesh", "chunk", "pages", "narrow"), KINDS_OF_CACHE)
def test_no_schedule_changes_the_tokens(cache: str, kind: str, mesh: str, chunk: int, pages: int, narrow: bool) -> None:
    requests = asks(1, 6) if cache == "latent" else asks(1)
    hold(model(kind, cache), requests, mesh, chunk, pages, ROOMY, narrow=narrow)


def test_the_same_buckets_give_equal_bits_after_migration() -> None:
    """Pages are transferred unchanged, so tokens equal those of one instance without tolerance."""
    requests = asks(1, 6)
    pair = Setup("2x1", 64, ROOMY, model=model("int8"))
    here, there = ([one.output for one in setup.each(requests)] for setup in (pair.narrowed("1x1", 64, ROOMY), pair))
    assert here == there
