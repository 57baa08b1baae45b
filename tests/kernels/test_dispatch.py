"""The choice of a backend, told with its reasons, and what every backend's attention has in common."""

from __future__ import annotations

import typing
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve.config import ServeConfig
from pallas_kernels import dispatch
from pallas_kernels.dispatch import BACKENDS, ORDER, Choice, Spec, Unsupported, attention, resolve
from pallas_kernels.layout import Ragged

from .ragged import deal, make

CPU = Spec("cpu", "float32", heads=4, kv_heads=2, head_dim=16, page=16)
H200 = Spec("gpu", "bfloat16", heads=32, kv_heads=8, head_dim=128, page=64, device="NVIDIA H200", capability="9.0")
PAGE, POOL, DIM, SCALE = 4, 48, 8, 0.3


def values(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def test_cpu_gets_xla_and_asks_nobody_else() -> None:
    assert resolve(CPU) == Choice("xla", CPU)


def test_orders_and_names_agree_with_the_settings() -> None:
    hint = typing.get_type_hints(ServeConfig)["attention_backend"]
    assert set(typing.get_args(hint)) == {"auto", *BACKENDS}
    assert all(order[-1] == "xla" and set(order) <= set(BACKENDS) for order in ORDER.values())


def test_what_is_refused_falls_through_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.mosaic_gpu, "supports", lambda spec: "page=8 is too small")
    choice = resolve(replace(H200, page=8))
    assert choice.backend == "xla" and choice.refusals == (("mosaic_gpu", "page=8 is too small"),)


def test_a_named_backend_never_falls_back() -> None:
    with pytest.raises(Unsupported, match=r"'mosaic_gpu' cannot run here: .*; allowed: auto, xla"):
        resolve(CPU, "mosaic_gpu")
    with pytest.raises(Unsupported, match=r"'cuda' is unknown; there are: auto, mosaic_gpu, tpu, xla"):
        resolve(CPU, "cuda")
    assert resolve(H200, "xla") == Choice("xla", H200)


def step(decode: bool) -> tuple[Any, ...]:
    """Arguments of an attention but its work, and the step."""
    rows = [(1, 6), (1, 7), (1, 8)] if decode else [(1, 6), (3, 7), (2, 8)]
    ragged = make(rows, deal(rows, page=PAGE, pool=POOL), page=PAGE, pool=POOL)
    tokens = len(ragged.rows)
    pool = values(POOL, PAGE, 4, DIM, seed=1), values(POOL, PAGE, 4, DIM, seed=2)
    angle = ragged.positions[:, None, None] * values(1, 1, DIM // 2, seed=3)
    turn = np.cos(angle), np.sin(angle)
    return values(tokens, 8, DIM), values(tokens, 4, DIM), values(tokens, 4, DIM), turn, pool, ragged


def program(one: dispatch.Attention, q: Any, k: Any, v: Any, turn: Any, pool: Any, ragged: Ragged) -> Any:
    return one(q, k, v, turn, pool, one.plan(ragged), scale=SCALE)


@pytest.mark.parametrize("decode", [True, False])
def test_split_heads_compute_the_same(decode: bool) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    one, other = (jax.jit(partial(program, attention(m, decode=decode)))(*step(decode)) for m in (None, mesh))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=0)


def test_no_turn_is_no_rotation() -> None:
    q, k, v, _, pool, ragged = step(True)
    still = jnp.ones((3, 1, DIM // 2)), jnp.zeros((3, 1, DIM // 2))
    got = [jax.jit(partial(program, attention()))(q, k, v, turn, pool, ragged) for turn in (None, still)]
    for a, b in zip(*map(jax.tree.leaves, got), strict=True):
        np.testing.assert_array_equal(a, b)
