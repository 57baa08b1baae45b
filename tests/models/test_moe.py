"""Experts of many tokens, which go through in parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import layers, moe, registry
from jaxserve.models.spec import ModelSpec
from jaxserve.models.weights import random_weights

from .driver import mesh

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 24, "hidden_size": 8, "num_hidden_layers": 1, "head_dim": 8,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 6, "norm_topk_prob": True,
}  # fmt: skip


def mixed(spec: ModelSpec, tp: int, x: np.ndarray) -> np.ndarray:
    (weights,) = random_weights(spec.for_tp(tp), "float32", [mesh(tp)])
    layer = moe.Moe(spec.for_tp(tp), "model.layers.0.mlp.")
    bound = layers.bind(layer, weights["layers"][0]["mlp"])
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(lambda x: bound(x, mesh(tp)))(jnp.asarray(x)))


@pytest.mark.parametrize("tp", [1, 2])
def test_parts_of_a_step_add_up_to_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch, tp: int) -> None:
    spec = registry.spec_from_config(CONFIG)
    x = np.random.default_rng(0).standard_normal((32, 8), np.float32)
    whole = mixed(spec, tp, x)
    monkeypatch.setattr(moe, "AT_ONCE", 8)
    np.testing.assert_allclose(mixed(spec, tp, x), whole, atol=1e-7)
    assert np.abs(whole).max() > 1e-6
