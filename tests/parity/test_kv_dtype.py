"""The law of tokens with an 8-bit KV cache: meshes, chunks, a tight pool and migration change nothing.

In float32, against the request alone with the same kind of cache; the model with the int8 cache has int8 weights too.
Another order of sums may carry a stored value over to the next of 8 bits, so scores closer than `CLOSE` may change
places.
"""

from __future__ import annotations

from functools import cache

import pytest

from jaxserve.sched.request import Request

from .law import LENGTH, PAGE, SPEC, Model, Setup, compare
from .test_law import ROOMY, asks

CLOSE = 0.05
TIGHT = LENGTH // PAGE + 4
KINDS = ("fp8", "int8")
SHAPES = (("1x1", 16, TIGHT), ("2x1", 16, TIGHT), ("2x2", 64, ROOMY), ("4x2", 64, TIGHT), ("1x8", 256, ROOMY))
BARE = [("fp8", "2x1", 16, TIGHT), ("int8", "2x2", 64, ROOMY)]


@cache
def model(kind: str) -> Model:
    return Model(SPEC.quantised_as("int8") if kind == "int8" else SPEC, close=CLOSE, kv=kind)


@cache
def alone(kind: str) -> tuple[Request, ...]:
    setup = Setup("1x1", 64, ROOMY, model=model(kind))
    assert {str(part.dtype) for pool in setup.executors[0].state.pools for part in pool} == {str(model(kind).stored)}
    return tuple(setup.run([ask])[0][0] for ask in asks(1))


def check(kind: str, mesh: str, chunk: int, pages: int) -> None:
    requests = asks(1)
    served, cluster = Setup(mesh, chunk, pages, model=model(kind)).run(requests, "unified")
    assert all(request.finish_reason in ("stop", "length") for request in served)
    if not mesh.startswith("1x"):
        assert cluster.mover.transfers > 0, "nothing was migrated"
    assert compare(requests, served, alone(kind), model(kind)) <= 1


@pytest.mark.parametrize(("kind", "mesh", "chunk", "pages"), BARE)
def test_no_schedule_changes_the_tokens(kind: str, mesh: str, chunk: int, pages: int) -> None:
    check(kind, mesh, chunk, pages)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "mesh", "chunk", "pages"),
    [(kind, *shape) for kind in KINDS for shape in SHAPES if (kind, *shape) not in BARE],
)
def test_no_schedule_changes_the_tokens_anywhere(kind: str, mesh: str, chunk: int, pages: int) -> None:
    check(kind, mesh, chunk, pages)


def test_the_same_buckets_give_the_same_bits_after_migration() -> None:
    """Pages travel as they are: prefilled elsewhere, tokens are those of one instance, without any allowance."""
    requests = asks(1, 6)
    setups = [Setup(mesh, 64, ROOMY, model=model("int8")) for mesh in ("1x1", "2x1")]
    here, there = ([setup.run([ask])[0][0].output for ask in requests] for setup in setups)
    assert here == there
