"""Mixtral: experts in every layer, with the checkpoint names of MiniMax M2."""

from __future__ import annotations

from jaxserve.models.context_length import Config
from jaxserve.models.minimax_m2 import Decoder, experts
from jaxserve.models.spec import ModelSpec, common

__all__ = ["Decoder", "read"]

DEFAULTS = {
    "rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 131_072,
}  # fmt: skip


def read(config: Config) -> ModelSpec:
    config = {**DEFAULTS, **config}
    facts = common(config, windows="all")
    return ModelSpec(**facts, moe=experts(config, facts))
