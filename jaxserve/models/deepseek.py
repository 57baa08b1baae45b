"""DeepSeek V2 and V3: multi-head latent attention (MLA), shared experts, and routing by groups of experts.

The cache holds one latent per token, from which the keys and values of all heads are computed (arXiv
2405.04434, section 2.1). Attention always runs on the latents, in prefill too: the up-projection of
keys is applied to the queries, and that of values to the attention output. To the kernel this is one
kv head of R + Z dimensions with the first R as its value, copied to each shard.

In an 8-bit pool each column of the latent has its own scale s. Queries are multiplied by s, because
(q s) . (c / s) = q . c, and so is the attention output. The kernel therefore needs no scales.

Letters: T tokens, E model dim, H query heads, K copies of the latent, R rank of the latent, Z rotary
dimensions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models import layers
from jaxserve.models.context_length import Config, rope_given
from jaxserve.models.layers import Array, Info, Source, Turns, angles, library, matrix, vector
from jaxserve.models.moe import Moe
from jaxserve.models.quantized import einsum
from jaxserve.models.rope import yarn_growth
from jaxserve.models.spec import (
    Experts,
    Latent,
    ModelSpec,
    architecture,
    common,
    need,
)
from jaxserve.sched.api.errors import InvalidValue
from pallas_kernels.attention.api import Attention as Kernel
from pallas_kernels.attention.api import AttentionInputs, Pool
from pallas_kernels.norms import like, rms_norm
from pallas_kernels.rope import Turn, rotate

EPS = 1e-6  # of the latents' norms; independent of the config's `rms_norm_eps`
ROUTING = {"DeepseekV2ForCausalLM": ("greedy", "group_limited_greedy"), "DeepseekV3ForCausalLM": ("noaux_tc",)}


def read(config: Config) -> ModelSpec:
    newer = architecture(config) == "DeepseekV3ForCausalLM"
    for key, only in (("attention_bias", False), ("mlp_bias", False), ("moe_layer_freq", 1)):
        _refuse(config, key, only)
    _refuse(config, "scoring_func", "sigmoid" if newer else "softmax")
    if not newer:  # implementations disagree about combining it with `routed_scaling_factor`
        _refuse(config, "norm_topk_prob", False)
    latent = Latent(
        rank=int(need(config, "kv_lora_rank")),
        turned=int(need(config, "qk_rope_head_dim")),
        straight=int(need(config, "qk_nope_head_dim")),
        value=int(need(config, "v_head_dim")),
        query_rank=int(config.get("q_lora_rank") or 0),
        interleaved=bool(config.get("rope_interleave", True)),
    )
    dim, given = latent.straight + latent.turned, rope_given(config)
    facts = {**common(config), "head_dim": dim, "kv_heads": 1}
    sharper = float(given.get("mscale_all_dim") or 0.0) if facts["rope"].kind != "default" else 0.0
    return ModelSpec(
        **facts,
        query_scale=dim**-0.5 * yarn_growth(float(given.get("factor") or 1.0), sharper) ** 2,
        latent=latent,
        moe=_experts(config, newer),
        guessing=int(config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0),
    )


def _refuse(config: Config, key: str, only: Any) -> None:
    if config.get(key) not in (None, only):
        raise InvalidValue(
            f"config.json: {key}={config[key]!r} is not supported for {architecture(config)}; supported is {only!r}",
            key,
        )


def _experts(config: Config, newer: bool) -> Experts:
    name = architecture(config)
    method, width = str(config.get("topk_method") or ROUTING[name][0]), int(need(config, "moe_intermediate_size"))
    if method not in ROUTING[name]:
        allowed = ", ".join(map(repr, ROUTING[name]))
        raise InvalidValue(
            f"config.json: topk_method={method!r} is not supported for {name}; supported: {allowed}", "topk_method"
        )
    count, dense = int(need(config, "num_hidden_layers")), int(config.get("first_k_dense_replace") or 0)
    grouped = method != "greedy"
    return Experts(
        experts=int(need(config, "n_routed_experts")),
        chosen=int(need(config, "num_experts_per_tok")),
        ff_dim=width,
        layers=tuple(i >= dense for i in range(count)),
        normalized=newer and bool(config.get("norm_topk_prob", True)),
        scoring="sigmoid" if newer else "softmax",
        corrected=newer,
        scaling=float(config.get("routed_scaling_factor") or 1.0),
        groups=int(need(config, "n_group")) if grouped else 1,
        groups_kept=int(need(config, "topk_group")) if grouped else 1,
        group_best=2 if newer else 1,
        shared=width * int(config.get("n_shared_experts") or 0),
    )


class Attention(nnx.Module):
    """MLA with the up-projections of keys and values applied to the queries and to the attention output."""

    def __init__(self, spec: ModelSpec, prefix: str) -> None:
        assert spec.latent is not None
        self.spec, self.latent = spec, spec.latent
        e, h, m = spec.dim, spec.heads, spec.latent
        inner, name = (m.query_rank, "q_b_proj.weight") if m.query_rank else (e, "q_proj.weight")
        self.q_down = matrix(prefix + "q_a_proj.weight", e, inner, ("dim", "rank")) if m.query_rank else None
        self.q_norm = vector(prefix + "q_a_layernorm.weight", inner, "rank") if m.query_rank else None
        source = Source(prefix + name, (h * spec.head_dim, inner))
        self.q = nnx.Param(
            Info((inner, h, spec.head_dim), ("dim", "heads", "pack"), (source,), self._query, contract=0)
        )
        source = Source(prefix + "kv_a_proj_with_mqa.weight", (m.rank + m.turned, e))
        self.kv_down = nnx.Param(Info((e, m.rank + m.turned), ("dim", "rank"), (source,), self._down, contract=0))
        self.kv_norm = vector(prefix + "kv_a_layernorm.weight", m.rank, "rank")
        up = (Source(prefix + "kv_b_proj.weight", (h * (m.straight + m.value), m.rank)),)
        self.k_up = nnx.Param(Info((h, m.straight, m.rank), ("heads", "pack", "rank"), up, self._keys))
        self.v_up = nnx.Param(Info((h, m.rank, m.value), ("heads", "rank", "pack"), up, self._values))
        self.out = matrix(prefix + "o_proj.weight", h * m.value, e, ("heads", "dim"))
        self.kv_scale = layers.kv_scale(spec.cache.dim, "rank") if spec.kv_scales else None

    def _turning(self, x: Array) -> Array:
        """Reorder the last Z dims of [..., dims, in] from interleaved pairs to the halves that `rotate` expects."""
        at = x.shape[-2] - self.latent.turned
        if not self.latent.interleaved:
            return x
        parts = [x[..., :at, :], x[..., at::2, :], x[..., at + 1 :: 2, :]]
        return library(x).concatenate(parts, axis=-2)  # type: ignore[no-any-return]

    def _query(self, x: Array) -> Array:
        """Rearrange [H * D, in] to [in, H, D]."""
        turned = self._turning(x.reshape(self.spec.heads, self.spec.head_dim, -1))
        return library(x).moveaxis(turned, -1, 0)  # type: ignore[no-any-return]

    def _down(self, x: Array) -> Array:
        """Transpose [R + Z, E] to [E, R + Z]."""
        return self._turning(x).T

    def _keys(self, x: Array) -> Array:
        """Select the keys of [H * (straight + value), R]: [H, straight, R]."""
        return x.reshape(self.spec.heads, -1, self.latent.rank)[:, : self.latent.straight]

    def _values(self, x: Array) -> Array:
        """Select the values of [H * (straight + value), R]: [H, R, value]."""
        return x.reshape(self.spec.heads, -1, self.latent.rank)[:, self.latent.straight :].swapaxes(1, 2)

    def __call__(
        self, x: jax.Array, turn: Turn | None, pool: Pool, work: Any, kernel: Kernel
    ) -> tuple[jax.Array, Pool]:  # x [T, E] -> [T, E]
        spec, m, tokens = self.spec, self.latent, x.shape[0]
        inner = x
        if self.q_down is not None and self.q_norm is not None:
            inner = rms_norm(x @ self.q_down[...], self.q_norm[...], EPS)
        straight, turned = jnp.split(einsum("te,ehd->thd", inner, self.q[...]), [m.straight], axis=-1)
        q = jnp.concatenate([jnp.einsum("thn,hnr->thr", straight, self.k_up[...]), rotate(turned, turn)], axis=-1)
        own, shared = jnp.split(x @ self.kv_down[...], [m.rank], axis=-1)
        own, shared = rms_norm(own, self.kv_norm[...], EPS), rotate(shared[:, None], turn)[:, 0]
        kept = jnp.concatenate([own, shared], axis=-1)  # [T, R + Z]
        if self.kv_scale is not None:  # divided in float32, so that values are rounded only once
            q, kept = scaled(q, self.kv_scale[...]), kept / like(self.kv_scale[...], kept)
        kept = jnp.broadcast_to(kept[:, None], (tokens, spec.cache.heads, spec.cache.dim))
        mixed, pool = kernel(AttentionInputs(q, kept, None, None, scale=spec.scale), pool, work)  # [T, H, at least R]
        mixed = mixed[..., : m.rank]
        if self.kv_scale is not None:
            mixed = scaled(mixed, self.kv_scale[: m.rank])
        out = jnp.einsum("thr,hrv->thv", mixed, self.v_up[...])
        return out.reshape(tokens, spec.heads * m.value) @ self.out[...], pool


def scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiply x [..., D] by scale [D], in the dtype of x."""
    return (x * like(scale, x)).astype(x.dtype)


class Block(layers.Block):
    def attend(self, prefix: str, index: int) -> Any:
        return Attention(self.spec, prefix)

    def feed_forward(self, prefix: str, index: int) -> Any:
        if self.spec.moe is None or not self.spec.moe.layers[index]:
            return super().feed_forward(prefix, index)
        return Moe(self.spec, prefix + "mlp.", correction="gate.e_score_correction_bias")


class Turning(layers.Decoder):
    """A decoder with RoPE on Z dimensions of each head only."""

    def turns(self, positions: jax.Array) -> Turns:
        assert self.spec.latent is not None
        return (angles(self.spec.rope, self.spec.latent.turned, positions),)


Decoder = partial(Turning, block=Block)
