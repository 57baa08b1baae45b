"""Llama 2 and 3, Mistral and models of the same form: biases if the config has them, no norms on q and k."""

from __future__ import annotations

from jaxserve.models.layers import Decoder
from jaxserve.models.spec import Config, ModelSpec, architecture, common

__all__ = ["Decoder", "read"]


def read(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    facts = common(config, windows=architecture(config) == "MistralForCausalLM")
    return ModelSpec(**facts, qkv_bias=bias, out_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)))
