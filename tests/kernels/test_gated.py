"""Gated products of dense feed-forwards: against float64, with the gates of the layers, and chosen on request only."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.models.layers import ACTIVATIONS
from pallas_kernels.choice import Choice, Unsupported
from pallas_kernels.ops.gated_matmul import hopper
from pallas_kernels.ops.gated_matmul.api import GATES, GatedMatmul, GatedSpec, gated, resolve_gated_matmul
from pallas_kernels.ops.grouped_matmul.hopper.body import Dense
from pallas_kernels.ops.grouped_matmul.hopper.matmul import Config
from tests.support.examples import cases, examples
from tests.support.kernels.checks.gated_matmul import check
from tests.support.kernels.interpreted import needs_interpreter
from tests.support.kernels.reference import error

H200 = GatedSpec("bfloat16", 4096, 14336, "silu", platform="gpu", device="NVIDIA H200", capability="9.0")
SERVED = {"llama3-8b": (4096, 14336), "qwen2.5-7b": (3584, 18944), "gemma3-1b": (1152, 6912), "tp4": (4096, 3584)}
FORMS = {
    "swapped": Config(8, 128, 2, 2, True, 2),
    "swapped 32": Config(32, 128, 2, 2, True, 3),
    "straight": Config(128, 128, 2, 2, False, 2),
    "wide": Config(128, 256, 2, 2, False, 1),
}


# Form, tokens, width, results, activation, dtype.
USUAL = [
    ("swapped", 13, 128, 128, "silu", "bfloat16"),
    ("straight", 70, 128, 128, "gelu_pytorch_tanh", "bfloat16"),
    ("wide", 40, 128, 128, "silu", "bfloat16"),
]
ROWS = product(FORMS, [1, 8, 20, 33, 64, 65, 129, 200], [192], [256], GATES, ["bfloat16", "float16"])


@needs_interpreter
@pytest.mark.parametrize(("form", "tokens", "width", "results", "activation", "dtype"), cases(USUAL, ROWS, apart=True))
def test_the_kernel_gates_its_products(
    form: str, tokens: int, width: int, results: int, activation: str, dtype: str
) -> None:
    check(tokens, width, results, activation, jnp.dtype(dtype), FORMS[form])


@pytest.mark.parametrize("activation", GATES)
def test_gates_are_those_of_the_layers(activation: str) -> None:
    gate, up = np.random.default_rng(0).standard_normal((2, 9, 33)).astype(np.float32) * 4
    want = ACTIVATIONS[activation](jnp.asarray(gate)) * up
    assert error(GATES[activation](jnp.asarray(gate), jnp.asarray(up)), np.asarray(want, np.float64)) < 1e-6


@settings(max_examples=examples(60))
@given(st.integers(1, 5000), st.sampled_from((8, 16, 64, 128)))
def test_tiles_cover_every_row_once(rows: int, tile: int) -> None:
    count = Dense(rows).count(tile)
    assert sum(min(rows - i * tile, tile) for i in range(count)) == rows and (count - 1) * tile < rows


@pytest.mark.parametrize("model", SERVED)
@pytest.mark.parametrize("tokens", [8, 16, 32, 64, 96, 128, 256, 1280, 2048])
def test_there_are_configs_for_what_is_served(model: str, tokens: int) -> None:
    """Tiles are enough for a third of the cores, and wide ones leave at most a quarter without any."""
    inputs, results = SERVED[model]
    spec = hopper.spec_of(tokens, inputs, 2 * results)
    config = hopper.heuristic(spec)
    config.validate(spec)
    assert hopper.supports(spec) is None and config.swapped == (tokens <= 32)
    assert config.columns == hopper.NARROW or 4 * hopper.items(config, spec) >= 3 * spec.cores
    assert config.stages >= 4


def test_what_does_not_fit_is_left_to_xla() -> None:
    spec = hopper.spec_of(64, 4096, 28672)
    for changes, reason in (
        ({"pairs": 7}, "it takes 8 to 2048 tokens, not 7"),
        ({"pairs": 2049}, "not 2049"),
        ({"width": 4100}, "multiples of 64"),
        ({"outputs": 28672 + 64}, "with a gate"),
        ({"outputs": 43 * 128}, "43 tiles are too few for 132 cores"),
        ({"dtype": jnp.float32}, "must be bfloat16 or float16"),
    ):
        assert reason in (hopper.supports(replace(spec, **changes)) or ""), changes
    x, weight = jnp.zeros((8, 128), jnp.bfloat16), jnp.zeros((64, 256), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"bfloat16\(8, 128\) and bfloat16\(64, 256\) do not match"):
        hopper.gated_matmul(x, weight, gate=GATES["silu"], config=FORMS["swapped"])
    assert GatedMatmul(H200)(x[:4], weight.reshape(64, 2, 128)) is None


def test_the_kernel_is_used_on_request_only() -> None:
    assert resolve_gated_matmul(H200) == Choice("xla", H200) and gated(Choice("xla", H200)) is gated(None) is None
    assert isinstance(gated(resolve_gated_matmul(H200, "mosaic_gpu")), GatedMatmul)
    for changes, reason in (
        ({"capability": "8.0"}, "it needs Hopper"),
        ({"dtype": "float32"}, "must be bfloat16 or float16"),
        ({"weights": "int8"}, "weights are int8; it takes 16 bits"),
        ({"biased": True}, "have biases"),
        ({"activation": "relu"}, "the activation is relu; it takes silu, gelu_pytorch_tanh"),
        ({"ff_dim": 14336 + 32}, "with a gate"),
    ):
        with pytest.raises(
            Unsupported, match=r"mlp backend 'mosaic_gpu' cannot run here: .*; allowed: auto, xla"
        ) as refused:
            resolve_gated_matmul(replace(H200, **changes), "mosaic_gpu")  # type: ignore[arg-type]
        assert reason in str(refused.value)
