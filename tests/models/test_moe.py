"""A mixture of experts against every expert for every token in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import layers, moe, registry
from jaxserve.models.dummy import random_weights
from jaxserve.models.spec import ModelSpec
from pallas_kernels.attention.api import attention
from pallas_kernels.ops.grouped_matmul.api import XlaExperts
from tests.support.models.driver import mesh

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 24, "hidden_size": 8, "num_hidden_layers": 1, "head_dim": 8,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 6, "norm_topk_prob": True,
}  # fmt: skip
SPEC = registry.spec_from_config(CONFIG)


def made(spec: ModelSpec, tp: int) -> Any:
    (weights,) = random_weights(spec.for_tp(tp), "float32", [mesh(tp)])
    return layers.bind(moe.Moe(spec.for_tp(tp), "model.layers.0.mlp."), weights["layers"][0]["mlp"])


def dense(layer: Any, x: np.ndarray) -> np.ndarray:
    router, gate_up, down = (np.asarray(p[...], np.float64) for p in (layer.router, layer.gate_up, layer.down))
    logits = x @ router
    share = np.exp(logits - logits.max(-1, keepdims=True))
    out = np.zeros_like(x, dtype=np.float64)
    for t, row in enumerate(x):
        best = np.argsort(-share[t], kind="stable")[: SPEC.moe.chosen if SPEC.moe else 0]
        for e in best:
            gate, up = np.split(row @ gate_up[e], 2)
            out[t] += share[t, e] / share[t, best].sum() * (gate / (1 + np.exp(-gate)) * up) @ down[e]
    return out


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tile", [1, 16])
def test_each_token_gets_its_experts(tp: int, tile: int) -> None:
    x = np.random.default_rng(0).standard_normal((33, 8), np.float32)
    layer = made(SPEC, tp)
    kernel = attention(mesh(tp), experts=XlaExperts(tile))
    with jax.default_matmul_precision("highest"):
        got = jax.jit(lambda x: layer(x, kernel))(jnp.asarray(x))
    np.testing.assert_allclose(got, dense(layer, x), atol=1e-7)
    assert np.abs(got).max() > 1e-6
