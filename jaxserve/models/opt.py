"""OPT: learned positions instead of RoPE, LayerNorm with biases, and a ReLU feed-forward without a gate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models import layers
from jaxserve.models.context_length import Config
from jaxserve.models.layers import ACTIVATIONS, Info, Source, Tree, Turns, bind, matrix, same, vector
from jaxserve.models.spec import ModelSpec, common, need
from jaxserve.sched.api.errors import InvalidValue
from pallas_kernels.norms import like

FIRST = 2  # row of position 0 in the table; OPT reserves the rows before it for padding
EPS = 1e-5


def read(config: Config) -> ModelSpec:
    for key, only in (
        ("do_layer_norm_before", True),
        ("enable_bias", True),
        ("layer_norm_elementwise_affine", True),
        ("_remove_final_layer_norm", False),
    ):
        if bool(config.get(key, only)) is not only:
            raise InvalidValue(f"config.json: {key}={config[key]!r} is not supported; supported is {only}", key)
    dim, inner = int(need(config, "hidden_size")), config.get("word_embed_proj_dim")
    if inner not in (None, dim):
        raise InvalidValue(
            f"config.json: word_embed_proj_dim={inner} is not supported; supported is hidden_size={dim}",
            "word_embed_proj_dim",
        )
    spelt = {
        "intermediate_size": need(config, "ffn_dim"),
        "rms_norm_eps": EPS,
        "num_key_value_heads": None,
        "head_dim": None,
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }
    return ModelSpec(**common({**config, **spelt}, activations=("relu",)), qkv_bias=True, out_bias=True, mlp_bias=True)


class LayerNorm(nnx.Module):
    """LayerNorm over the last axis, computed in float32."""

    def __init__(self, prefix: str, size: int) -> None:
        self.weight = vector(prefix + "weight", size)
        self.bias = vector(prefix + "bias", size, fill=0.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
        unit = centered * jax.lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + EPS)
        weight, bias = (like(part[...], x).astype(jnp.float32) for part in (self.weight, self.bias))
        return (unit * weight + bias).astype(x.dtype)


class Mlp(nnx.Module):
    """A feed-forward without a gate: up projection, ReLU, down projection."""

    def __init__(self, spec: ModelSpec, prefix: str) -> None:
        self.activation = spec.activation
        self.up = matrix(prefix + "fc1.weight", spec.dim, spec.ff_dim, ("dim", "ff"))
        self.up_bias = vector(prefix + "fc1.bias", spec.ff_dim, "ff", 0.0)
        self.down = matrix(prefix + "fc2.weight", spec.ff_dim, spec.dim, ("ff", "dim"))
        self.down_bias = vector(prefix + "fc2.bias", spec.dim, fill=0.0)

    def __call__(self, x: jax.Array, kernel: Any = None) -> jax.Array:  # x [T, E] -> [T, E]
        up = x @ self.up[...]
        up = ACTIVATIONS[self.activation](up + like(self.up_bias[...], up))
        out: jax.Array = up @ self.down[...]
        return out + like(self.down_bias[...], out)


class Block(layers.Block):
    """A layer with LayerNorms, OPT's feed-forward, and biases on all projections."""

    def __init__(self, spec: ModelSpec, prefix: str, index: int) -> None:
        self.spec, self.rope = spec, 0
        self.mixed_norm = self.fed_norm = None
        self.attention_norm: Any = LayerNorm(prefix + "self_attn_layer_norm.", spec.dim)
        self.attention = layers.Attention(spec, prefix + "self_attn.", index, out="out_proj.")
        self.mlp_norm: Any = LayerNorm(prefix + "final_layer_norm.", spec.dim)
        self.mlp = Mlp(spec, prefix)

    def normed(self, x: jax.Array, weight: LayerNorm | None) -> jax.Array:
        return x if weight is None else weight(x)


class Decoder(layers.Decoder):
    """A decoder with embedding tables for tokens and for positions."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, Block, "model.decoder.")
        shape = (spec.max_positions + FIRST, spec.dim)
        source = Source("model.decoder.embed_positions.weight", shape)
        self.positions = nnx.Param(Info(shape, ("position", "dim"), (source,), same))
        self.norm: LayerNorm = LayerNorm("model.decoder.final_layer_norm.", spec.dim)

    def embedded(self, weights: Tree, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        learned = jnp.take(weights["positions"], positions + FIRST, axis=0, mode="clip")
        return super().embedded(weights, tokens, positions) + learned

    def turns(self, positions: jax.Array) -> Turns:
        return (None,)

    def finish(self, weights: Tree, x: jax.Array) -> jax.Array:
        norm: LayerNorm = bind(self.norm, weights["norm"])
        return norm(x)
