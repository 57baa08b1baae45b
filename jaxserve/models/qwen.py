"""Qwen 2 and 2.5 (biases on q, k and v) and Qwen 3 (norms on q and k, biases only if the config has them)."""

from __future__ import annotations

from jaxserve.models.layers import Decoder
from jaxserve.models.spec import Config, Experts, ModelSpec, architecture, common

__all__ = ["Decoder", "qwen3", "read"]


def read(config: Config) -> ModelSpec:
    if architecture(config) == "Qwen2ForCausalLM":
        return ModelSpec(**common(config, windows=True), qkv_bias=True)
    return qwen3(config)


def qwen3(config: Config, moe: Experts | None = None) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    head_dim = int(config.get("head_dim") or 128)  # Qwen 3's default; not derived from the model dim
    facts = {**common(config, windows=True), "head_dim": head_dim}
    return ModelSpec(**facts, qk_norm="head", qkv_bias=bias, out_bias=bias, moe=moe)
