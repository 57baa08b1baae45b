"""Weights that lie as [out, in]: the same products, and for few tokens the weight on the left of them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import registry
from jaxserve.models.quantised import einsum
from jaxserve.models.transposed import FEW, Transposed, product
from jaxserve.models.weights import random_weights

from .driver import mesh
from .test_weights import CONFIG


def made(tokens: int, *outputs: int, inputs: int = 24) -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(tokens)
    x = jnp.asarray(random.standard_normal((tokens, inputs)), jnp.float32)
    return x, jnp.asarray(random.standard_normal((inputs, *outputs)), jnp.float32)


@pytest.mark.parametrize("tokens", [1, 7, FEW, FEW + 1])
def test_products_are_those_of_the_weight(tokens: int) -> None:
    x, weight = made(tokens, 6)
    turned = Transposed(weight.T)
    assert turned.shape == weight.shape
    np.testing.assert_allclose(x @ turned, x @ weight, rtol=1e-5, atol=1e-5)
    x, weight = made(tokens, 2, 10)
    turned = Transposed(jnp.moveaxis(weight, 0, -1))
    np.testing.assert_allclose(
        einsum("te,epf->tpf", x, turned), jnp.einsum("te,epf->tpf", x, weight), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("tokens", "left"), [(8, True), (FEW, True), (FEW + 64, False)])
def test_few_tokens_have_the_weight_on_the_left(tokens: int, left: bool) -> None:
    """XLA would turn such a product round, and then pack the weight at every step."""
    x, weight = made(tokens, 512, inputs=256)
    text = jax.jit(lambda x, w: jnp.tanh(product(x, w)) * 2.0).lower(x, weight.T).compile().as_text()
    (shape,) = re.findall(r"= f32\[(\d+,\d+)\]\S* dot\(", text)
    assert shape == (f"512,{tokens}" if left else f"{tokens},512")


def test_the_whole_only_can_be_taken() -> None:
    turned = Transposed(jnp.zeros((2, 3)))
    assert turned[...] is turned
    with pytest.raises(TypeError, match="as weight"):
        turned[0]


@pytest.mark.parametrize("tp", [1, 2])
def test_random_weights_are_the_same_model(tp: int) -> None:
    spec = registry.spec_from_config(CONFIG).for_tp(tp)
    (plain,) = random_weights(spec, "float32", [mesh(tp)])
    (turned,) = random_weights(replace(spec, transposed=True), "float32", [mesh(tp)])
    count = 0

    def same(held: Any, weight: jax.Array) -> None:
        nonlocal count
        if isinstance(held, Transposed):
            count += 1
            assert held.shape == weight.shape
            assert held.values.addressable_shards[0].data.size == weight.addressable_shards[0].data.size
            held = jnp.moveaxis(held.values, -1, 0)
        np.testing.assert_array_equal(held, weight)

    jax.tree.map(same, turned, plain, is_leaf=lambda x: isinstance(x, Transposed))
    assert count == 4 * spec.layers  # queries, keys and values; what mixes heads; gate and up; down
