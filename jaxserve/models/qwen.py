"""Qwen 2, 2.5 (biases on q, k and v) and 3 (norms on q and k, no biases unless asked for)."""

from __future__ import annotations

from jaxserve.models.layers import Decoder
from jaxserve.models.spec import Config, ModelSpec, architecture, common

__all__ = ["Decoder", "read"]


def read(config: Config) -> ModelSpec:
    if architecture(config) == "Qwen2ForCausalLM":
        return ModelSpec(**common(config), qkv_bias=True)
    bias = bool(config.get("attention_bias", False))
    head_dim = int(config.get("head_dim") or 128)  # Qwen 3 does not derive it from the model dim
    return ModelSpec(**{**common(config), "head_dim": head_dim}, qk_norm=True, qkv_bias=bias, out_bias=bias)
