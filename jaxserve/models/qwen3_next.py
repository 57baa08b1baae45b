"""Qwen3-Next: gated DeltaNet in most layers, gated attention in the others, and experts with a gated shared one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models import layers
from jaxserve.models.context_length import Config
from jaxserve.models.delta_net import DeltaNet
from jaxserve.models.layers import Array, Info, Mlp, Source, Stream, library, matrix
from jaxserve.models.moe import Moe
from jaxserve.models.quantized import einsum
from jaxserve.models.spec import Delta, Experts, ModelSpec, common, need
from jaxserve.sched.api.errors import InvalidValue, short
from pallas_kernels.attention.api import Attention as Kernel
from pallas_kernels.attention.api import Pool

DEFAULTS = {
    "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4,
    "partial_rotary_factor": 0.25, "max_position_embeddings": 32_768, "norm_topk_prob": True,
}  # fmt: skip
KINDS = ("full_attention", "linear_attention")


def read(config: Config) -> ModelSpec:
    config = {**DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    count, every = int(need(config, "num_hidden_layers")), int(config["full_attention_interval"])
    linear = [(i + 1) % every != 0 for i in range(count)]
    if kinds := config.get("layer_types"):
        if len(kinds) != count or not set(kinds) <= set(KINDS):
            what = f"config.json: layer_types={short(kinds)} must be {count} of {', '.join(KINDS)}"
            raise InvalidValue(what, "layer_types")
        linear = [kind == "linear_attention" for kind in kinds]
    dense, step = set(config.get("mlp_only_layers") or ()), int(config.get("decoder_sparse_step") or 1)
    experts = int(config.get("num_experts") or 0)
    sparse = tuple(experts > 0 and (i + 1) % step == 0 and i not in dense for i in range(count))
    moe = Experts(
        experts=experts,
        chosen=int(need(config, "num_experts_per_tok")),
        ff_dim=int(need(config, "moe_intermediate_size")),
        normalized=bool(config["norm_topk_prob"]),
        layers=sparse,
        shared=int(need(config, "shared_expert_intermediate_size")),
    ) if any(sparse) else None  # fmt: skip
    bias = bool(config.get("attention_bias", False))
    if bias:
        raise InvalidValue("config.json: attention_bias=True is not supported for Qwen3-Next", "attention_bias")
    return ModelSpec(
        **common({**config, "layer_types": None}, partials=True),
        qk_norm="head",
        norm_offset=1.0,
        moe=moe,
        delta=Delta(
            key_heads=int(config["linear_num_key_heads"]),
            value_heads=int(config["linear_num_value_heads"]),
            key_dim=int(config["linear_key_head_dim"]),
            value_dim=int(config["linear_value_head_dim"]),
            kept=int(config["linear_conv_kernel_dim"]) - 1,
            layers=tuple(linear),
        ),
    )


class Attention(layers.Attention):
    """Attention whose output is multiplied by a gate; `q_proj` has the query and the gate of a head together."""

    def __init__(self, spec: ModelSpec, prefix: str, index: int) -> None:
        super().__init__(spec, prefix, index)
        e, h, d = spec.dim, spec.heads, spec.head_dim
        source = Source(f"{prefix}q_proj.weight", (2 * h * d, e))
        info = Info((e, h, d), ("dim", "heads", "pack"), (source,), self._gate, contract=0)
        self.gate = nnx.Param(info)

    def _sources(self, prefix: str, leaf: str, *rest: int) -> tuple[Source, ...]:
        q, *others = super()._sources(prefix, leaf, *rest)
        return replace(q, shape=(2 * q.shape[0], *rest)), *others

    def _pack(self, q: Array, k: Array, v: Array) -> Array:
        return super()._pack(self._half(q, 0), k, v)

    def _half(self, q: Array, half: int) -> Array:
        heads, d = self.spec.heads, self.spec.head_dim
        return q.reshape(heads, 2, d, *q.shape[1:])[:, half].reshape(heads * d, *q.shape[1:])

    def _gate(self, q: Array) -> Array:
        half = self._half(q, 1)
        return library(q).moveaxis(half.reshape(self.spec.heads, self.spec.head_dim, -1), -1, 0)  # type: ignore[no-any-return]

    def gated(self, x: jax.Array, mixed: jax.Array) -> jax.Array:  # x [T, E], mixed [T, H, D]
        gate = einsum("te,ehd->thd", x, self.gate[...])
        return mixed * jax.nn.sigmoid(gate)


class SharedMoe(Moe):
    """Experts, and one for every token that has a gate of its own."""

    def __init__(self, spec: ModelSpec, prefix: str) -> None:
        super().__init__(spec, prefix)
        assert spec.moe is not None
        self.shared = Mlp(replace(spec, ff_dim=spec.moe.shared), prefix + "shared_expert.")
        self.shared_gate = matrix(prefix + "shared_expert_gate.weight", spec.dim, 1, ("dim", "choice"), contract=None)

    def share(self, x: jax.Array) -> jax.Array:
        assert self.shared is not None
        return jax.nn.sigmoid(jnp.einsum("te,eo->to", x, self.shared_gate[...])) * self.shared(x)


class Block(layers.Block):
    def attend(self, prefix: str, index: int) -> Any:
        assert self.spec.delta is not None
        if self.spec.delta.layers[index]:
            return DeltaNet(self.spec, prefix.replace("self_attn.", "linear_attn."))
        return Attention(self.spec, prefix, index)

    def feed_forward(self, prefix: str, index: int) -> Any:
        mixed = self.spec.moe is not None and self.spec.moe.layers[index]
        return SharedMoe(self.spec, prefix + "mlp.") if mixed else super().feed_forward(prefix, index)

    def mix(self, stream: Stream, pool: Pool, kernel: Kernel) -> tuple[jax.Array, Pool]:
        if not isinstance(self.attention, DeltaNet):
            return super().mix(stream, pool, kernel)
        with jax.named_scope("delta_net"):
            mixed, pool = self.attention(self.normed(stream.x, self.attention_norm), stream.rows, pool, kernel)
            return self.added(stream.x, mixed, self.mixed_norm), pool


Decoder = partial(layers.Decoder, block=Block)
