"""Weights stored as [out, in]: equal products, with the weight on the left for few tokens."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.models import registry
from jaxserve.models.dummy import random_weights
from jaxserve.models.quantized import Quantized, einsum
from jaxserve.models.transposed import BLOCK, FEW, Transposed, _blocks, product
from tests.support.models.configs import CONFIG
from tests.support.models.driver import mesh


def made(tokens: int, *outputs: int, inputs: int = 24) -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(tokens)
    x = jnp.asarray(random.standard_normal((tokens, inputs)), jnp.float32)
    return x, jnp.asarray(random.standard_normal((inputs, *outputs)), jnp.float32)


@pytest.mark.parametrize("tokens", [1, 7, FEW, FEW + 1])
def test_products_equal_those_of_the_original_weight(tokens: int) -> None:
    x, weight = made(tokens, 6)
    transposed = Transposed(weight.T)
    assert transposed.shape == weight.shape
    np.testing.assert_allclose(x @ transposed, x @ weight, rtol=1e-5, atol=1e-5)
    x, weight = made(tokens, 2, 10)
    transposed = Transposed(jnp.moveaxis(weight, 0, -1))
    np.testing.assert_allclose(
        einsum("te,epf->tpf", x, transposed), jnp.einsum("te,epf->tpf", x, weight), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("tokens", "left"), [(8, True), (FEW, True), (FEW + 64, False)])
def test_few_tokens_have_the_weight_on_the_left(tokens: int, left: bool) -> None:
    """XLA would swap the operands of the product and then repack the weight at every step."""
    x, weight = made(tokens, 512, inputs=256)
    text = jax.jit(lambda x, w: jnp.tanh(product(x, w)) * 2.0).lower(x, weight.T).compile().as_text()
    (shape,) = re.findall(r"= f32\[(\d+,\d+)\]\S* dot\(", text)
    assert shape == (f"512,{tokens}" if left else f"{tokens},512")


@pytest.mark.parametrize("tokens", [8, FEW + 64])
def test_devices_keep_their_shards_of_a_weight(tokens: int) -> None:
    """Otherwise a step of many tokens would gather gate and up, stored as [2, F, E] with F sharded, each time."""
    spec = replace(registry.spec_from_config(CONFIG).for_tp(2), transposed=True)
    devices = mesh(2)
    (weights,) = random_weights(spec, "float32", [devices])
    x = jax.device_put(np.ones((tokens, spec.dim), np.float32), NamedSharding(devices, PartitionSpec()))
    transposed = [
        leaf for leaf in jax.tree.leaves(weights["layers"][0], is_leaf=_whole) if isinstance(leaf, Transposed)
    ]
    split = [
        one for one in transposed if "tp" in one.values.sharding.spec[:-1]
    ]  # not those with partial sums over devices
    assert sorted(one.split for one in split) == [0, 1]
    for one in split:
        compiled = jax.jit(lambda x, w: einsum("te,e...->t...", x, w)).lower(x, one).compile()
        assert not re.search(r"all-gather|all-to-all|collective-permute|all-reduce", compiled.as_text())
        gathered = Transposed(jnp.asarray(np.asarray(one.values)))
        np.testing.assert_allclose(compiled(x, one), einsum("te,e...->t...", x, gathered), rtol=1e-5, atol=1e-5)


def test_a_transposed_weight_cannot_be_indexed() -> None:
    transposed = Transposed(jnp.zeros((2, 3)))
    assert transposed[...] is transposed
    with pytest.raises(TypeError, match="supports weight"):
        transposed[0]


@pytest.mark.parametrize("tp", [1, 2])
def test_random_transposed_weights_are_the_same_model(tp: int) -> None:
    spec = registry.spec_from_config(CONFIG).for_tp(tp)
    (plain,) = random_weights(spec, "float32", [mesh(tp)])
    (transposed,) = random_weights(replace(spec, transposed=True), "float32", [mesh(tp)])
    count = 0

    def same(held: Any, weight: jax.Array) -> None:
        nonlocal count
        if isinstance(held, Transposed):
            count += 1
            assert held.shape == weight.shape
            assert held.values.addressable_shards[0].data.size == weight.addressable_shards[0].data.size
            held = jnp.moveaxis(held.values, -1, 0)
        np.testing.assert_array_equal(held, weight)

    jax.tree.map(same, transposed, plain, is_leaf=lambda x: isinstance(x, Transposed))
    assert count == 4 * spec.layers  # QKV, output projection, gate and up, down


@pytest.mark.parametrize("tokens", [1, 7, FEW + 1])
@pytest.mark.parametrize("outputs", [(6,), (2, 10), (3, 701)])
def test_8_bit_products_equal_those_of_the_widened_weight(tokens: int, outputs: tuple[int, ...]) -> None:
    inputs = 1024
    x, _ = made(tokens, *outputs, inputs=inputs)
    random = np.random.default_rng(0)
    values = jnp.asarray(random.integers(-127, 128, (*outputs, inputs)), jnp.int8)
    scale = jnp.asarray(random.uniform(0.01, 0.02, (*outputs, 1)), jnp.float32)
    weight = Quantized(values, scale, len(outputs))
    assert weight.transposed and weight.shape == (inputs, *outputs)
    wide = jnp.moveaxis(weight.widened(jnp.float32), -1, 0)
    got = einsum("te,ef->tf" if len(outputs) == 1 else "te,epf->tpf", x, weight)
    np.testing.assert_allclose(got, jnp.tensordot(x, wide, 1), rtol=1e-4, atol=1e-3)


def test_blocks_are_equal_and_small() -> None:
    for rows, inputs in ((5632, 1024), (151_936, 2048), (7, BLOCK), (7, 3 * BLOCK), (1, 5), (701, 3000)):
        count = _blocks(rows, inputs)
        assert rows % count == 0 and (rows // count * inputs <= BLOCK or count == rows)


def test_no_widened_weight_is_materialized() -> None:
    """The compiled program allocates a block of the widened weight, not the whole."""
    values, scale = jnp.zeros((8192, 1024), jnp.int8), jnp.ones((8192, 1), jnp.float32)
    run = jax.jit(lambda x, v, s: einsum("te,ef->tf", x, Quantized(v, s, 1)))
    memory = run.lower(jnp.zeros((8, 1024)), values, scale).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2 * 4 * BLOCK < 4 * values.size


def test_random_8_bit_weights_are_the_same_model() -> None:
    spec = registry.spec_from_config(CONFIG).quantized_as("int8")
    (plain,) = random_weights(spec, "float32", [mesh(1)])
    (transposed,) = random_weights(replace(spec, transposed=True, whole=True), "float32", [mesh(1)])
    found = [leaf for leaf in jax.tree.leaves(transposed, is_leaf=_whole) if isinstance(leaf, Quantized)]
    pairs = zip(
        found, (one for one in jax.tree.leaves(plain, is_leaf=_whole) if isinstance(one, Quantized)), strict=True
    )
    for held, weight in pairs:
        assert held.transposed and not weight.transposed and held.shape == weight.shape
        wide = jnp.moveaxis(held.widened(jnp.float32), -1, 0)
        np.testing.assert_array_equal(wide, weight.widened(jnp.float32))
    assert found


def _whole(leaf: Any) -> bool:
    return isinstance(leaf, (Quantized, Transposed))
