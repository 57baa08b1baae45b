"""The text model of Gemma 3.

It has sliding windows in most layers, a different RoPE in these, norms before and after attention and
feed-forward, and scaled embeddings.
"""

from __future__ import annotations

from functools import partial

import jax

from jaxserve.models import layers
from jaxserve.models.layers import Stream, vector
from jaxserve.models.spec import Config, ModelSpec, common, need, read_rope
from pallas_kernels.attention.api import Attention as Kernel
from pallas_kernels.attention.api import Pool

LOCAL_THETA = 10_000.0
EVERY = 6  # one in so many layers has no window, unless the config says otherwise


def read(config: Config) -> ModelSpec:
    kinds = _kinds(config)
    wide, local = _ropes(config)
    bias = bool(config.get("attention_bias", False))
    facts = common({**config, **kinds, **wide}, activations=("gelu_pytorch_tanh",), windows=True)
    own = {
        "head_dim": int(config.get("head_dim") or 256),
        "tied": bool(config.get("tie_word_embeddings", True)),
        "embed_scale": float(facts["dim"]) ** 0.5,
        "query_scale": float(config.get("query_pre_attn_scalar") or 256) ** -0.5,
        "softcap": float(config.get("attn_logit_softcapping") or 0.0),
        "logit_softcap": float(config.get("final_logit_softcapping") or 0.0),
    }
    return ModelSpec(
        **{**facts, **own},
        local_rope=read_rope(local)[0],
        norm_offset=1.0,
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
    )


def _kinds(config: Config) -> Config:
    """Return `layer_types` for older configs, which have a pattern instead."""
    if config.get("layer_types"):
        return {}
    every = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or EVERY)
    count = int(need(config, "num_hidden_layers"))
    return {"layer_types": ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)]}


def _ropes(config: Config) -> tuple[Config, Config]:
    """Return the configs that `read_rope` reads for layers without and with a window, from both formats."""
    positions = {"max_position_embeddings": config.get("max_position_embeddings") or 131_072}
    given = config.get("rope_parameters") or {}
    if "full_attention" in given:
        wide, local = given["full_attention"], given.get("sliding_attention") or {}
    else:
        wide = {"rope_theta": config.get("rope_theta") or 1e6, **(config.get("rope_scaling") or {}), **given}
        local = {"rope_theta": config.get("rope_local_base_freq") or LOCAL_THETA}
    plain = {**positions, "rope_scaling": None, "rope_theta": None}
    return {**plain, "rope_parameters": wide}, {**plain, "rope_parameters": local}


class Block(layers.Block):
    """A layer with norms after attention and feed-forward as well."""

    def __init__(self, spec: ModelSpec, prefix: str, index: int) -> None:
        super().__init__(spec, prefix, index)
        self.mixed_norm = vector(prefix + "post_attention_layernorm.weight", spec.dim)
        self.mlp_norm = vector(prefix + "pre_feedforward_layernorm.weight", spec.dim)
        self.fed_norm = vector(prefix + "post_feedforward_layernorm.weight", spec.dim)

    def mix(self, stream: Stream, pool: Pool, kernel: Kernel) -> tuple[jax.Array, Pool]:
        x, turns, work = stream
        with jax.named_scope("attention"):
            normed = self.normed(x, self.attention_norm)
            mixed, pool = self.attention(normed, turns[self.rope], pool, work, kernel)
            return x + self.normed(mixed, self.mixed_norm), pool

    def feed(self, x: jax.Array, kernel: Kernel) -> jax.Array:  # x [T, E] -> [T, E]
        with jax.named_scope("mlp"):
            return x + self.normed(self.mlp(self.normed(x, self.mlp_norm), kernel), self.fed_norm)


Decoder = partial(layers.Decoder, block=Block)
