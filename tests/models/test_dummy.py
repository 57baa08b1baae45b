"""Random weights made on devices: the numbers that their names give, of every family, on any mesh."""

from __future__ import annotations

import re
import zlib
from copy import deepcopy
from itertools import product
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest
import transformers

from jaxserve.engine.startup.compiled import compile_counter
from jaxserve.models import dummy, registry
from jaxserve.models.dummy import random_weights
from jaxserve.models.layers import Info
from jaxserve.models.published import published_spec
from jaxserve.models.quantized import Quantized
from jaxserve.models.spec import ModelSpec
from jaxserve.models.weights import on_host, shardings
from tests.support.examples import cases
from tests.support.models.configs import CASES, FULL
from tests.support.models.driver import SMALL, mesh

MODELS = CASES | FULL
FEW = ("llama3, biases", "deepseek-v2, groups, a latent of queries", "gpt-oss", "odd vocabulary")


def spec_of(case: str, **changes: Any) -> ModelSpec:
    family, own = MODELS[case]
    kind = f"{family}TextConfig" if hasattr(transformers, f"{family}TextConfig") else f"{family}Config"
    config = getattr(transformers, kind)(**deepcopy({**SMALL, **own, **changes})).to_dict()  # it writes into dicts
    return registry.spec_from_config({**config, "architectures": [f"{family}ForCausalLM"]})


def is_info(x: Any) -> bool:
    return isinstance(x, Info)


def is_quantized(x: Any) -> bool:
    return isinstance(x, Quantized)


def mixed(word: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    word = (word ^ word >> 16) * 0x7FEB352D % 2**32
    word = (word ^ word >> 15) * 0x846CA68B % 2**32
    return word ^ word >> 16


def drawn(name: str, shape: tuple[int, ...], info: Info, seed: int) -> npt.NDArray[Any]:
    """Return a tensor in wide integers, one byte after another."""
    first, second = np.random.SeedSequence((seed, zlib.crc32(name.encode()))).generate_state(2, np.uint32)
    place = np.arange(np.prod(shape), dtype=np.uint64)
    word = mixed((mixed(place ^ int(first)) + int(second)) % 2**32)
    sums = sum((word >> (8 * i) & 0xFF).astype(np.int64) for i in range(4)) - 510
    std = {"int8": 127 / 6, "float8_e4m3fn": 448 / 6}.get(np.dtype(info.dtype).name, info.init)
    values = sums.astype(np.float32) * np.float32(std / (4 * 65535 / 12) ** 0.5)
    return (np.rint(values) if info.dtype == "int8" else values).astype(info.dtype).reshape(shape)


SAMPLE = [
    *((case, None, 2, "float32") for case in FEW),
    *(("qwen3-moe", name, 2, "bfloat16") for name in ("int8", "fp8_per_block")),
]
EVERY = product(MODELS, [None, "int8", "fp8", "fp8_per_block"], [1, 4], ["bfloat16"])


@pytest.mark.parametrize(("case", "name", "tp", "dtype"), cases(SAMPLE, EVERY, apart=True))
def test_every_number_is_that_of_its_tensor_and_place(case: str, name: str | None, tp: int, dtype: str) -> None:
    spec, seed = spec_of(case).quantized_as(name).for_tp(tp), 7
    (tree,) = random_weights(spec, dtype, [mesh(tp)], seed=seed)
    abstract = registry.abstract_weights(spec, dtype)
    assert jax.tree.map(lambda leaf: leaf.sharding, tree) == shardings(spec, mesh(tp))
    params, held = (jax.tree.leaves(one, is_leaf=is_quantized) for one in (abstract, tree))
    for param, weight in zip(params, held, strict=True):
        info = param.values if is_quantized(param) else param
        if is_quantized(param):
            most = np.float32(6 * info.init / {"int8": 127, "float8_e4m3fn": 448}[info.dtype.name])
            np.testing.assert_array_equal(weight.scale, np.full(param.scale.shape, most))
            weight = weight.values
        if info.init:
            tensors = [drawn(source.name, source.shape, info, seed) for source in info.sources]
        else:
            tensors = [np.full(source.shape, info.fill) for source in info.sources]
        assert weight.dtype == info.dtype
        np.testing.assert_array_equal(np.asarray(weight), on_host(info, tensors))


def test_layers_of_a_kind_are_compiled_once() -> None:
    def compiled(layers: int) -> int:
        kinds = ["sliding_attention", "full_attention"] * layers
        spec = spec_of("gemma3", num_hidden_layers=2 * layers, layer_types=kinds)
        assert len(set(spec.kinds)) == 2
        before = compile_counter().after_warmup
        random_weights(spec, "float32", [mesh(1)])
        return compile_counter().after_warmup - before

    assert compiled(1) == compiled(4) == 3  # two kinds of layers, and what is outside


@pytest.mark.parametrize("case", ["gemma3", "qwen3-next", "olmo3"])
def test_norms_do_not_scale(case: str) -> None:
    spec = spec_of(case)
    (tree,) = random_weights(spec, "float32", [mesh(1)])
    norms = {name: leaf for layer in tree["layers"] for name, leaf in layer.items() if name.endswith("_norm")}
    norms |= {name: layer["attention"][name] for layer in tree["layers"] for name in ("q_norm", "k_norm")
              if name in layer["attention"]}  # fmt: skip
    assert {"mixed_norm", "q_norm", "k_norm"} <= norms.keys() or case == "qwen3-next"
    for weight in (*norms.values(), tree["norm"]):
        np.testing.assert_array_equal(weight + spec.norm_offset, 1.0)


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-30b-a3b"])
def test_devices_exchange_nothing_and_hold_no_second_copy(name: str) -> None:
    spec = published_spec(name).for_tp(2)
    part, places = registry.abstract_weights(spec, "bfloat16")["layers"][0], shardings(spec, mesh(2))["layers"][0]
    infos = [info for info in jax.tree.leaves(part, is_leaf=is_info) if info.init and info.sources]
    program: Any = dummy._program(part, places)
    compiled = program.lower([np.zeros((len(info.sources), 2), np.uint32) for info in infos]).compile()
    assert not re.search(r"all-gather|all-to-all|collective-permute|all-reduce", compiled.as_text())
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < memory.output_size_in_bytes / 2


def test_numbers_are_near_normal_and_independent() -> None:
    spec = spec_of("llama", vocab_size=4096)
    (tree,) = random_weights(spec, "float32", [mesh(1)])
    (other,) = random_weights(spec, "float32", [mesh(1)], seed=1)
    x, y, z = (np.asarray(one, np.float64).ravel() / 0.02 for one in (tree["embed"], tree["head"], other["embed"]))
    for power, moment in enumerate([0, 1, 0, 3 - 0.3], start=1):  # four bytes have a kurtosis of -6 / 5 / 4 less
        assert abs(np.mean(x**power) - moment) < 10 * np.sqrt(15 / x.size)
    for shift in (1, 32, 4096):
        assert abs(np.mean(x[shift:] * x[:-shift])) < 5 / np.sqrt(x.size)
    assert abs(np.mean(x * y)) < 5 / np.sqrt(x.size) and abs(np.mean(x * z)) < 5 / np.sqrt(x.size)
