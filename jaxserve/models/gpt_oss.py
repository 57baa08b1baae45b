"""gpt-oss: attention sinks, a sliding window in every other layer, experts with biases and a clamped gate.

Checkpoints have the experts' weights in bfloat16 or in MXFP4 (see `mxfp4`). `weights` reads both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flax import nnx

from jaxserve.models import layers
from jaxserve.models.context_length import Config
from jaxserve.models.layers import Array, Info, Source, library, same
from jaxserve.models.moe import Moe
from jaxserve.models.spec import Experts, ModelSpec, common, need

THETA = 150_000.0


def read(config: Config) -> ModelSpec:
    count = int(need(config, "num_hidden_layers"))
    kinds = config.get("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    spelt = {"layer_types": kinds, "rope_theta": config.get("rope_theta") or THETA}
    facts = common({**config, **spelt}, windows="some")
    bias = bool(config.get("attention_bias", True))
    limit, slope, eps = (config.get(key) for key in ("swiglu_limit", "swiglu_alpha", "rms_norm_eps"))
    moe = Experts(
        experts=int(config.get("num_local_experts") or need(config, "num_experts")),
        chosen=int(config.get("num_experts_per_tok") or need(config, "experts_per_token")),
        ff_dim=facts["ff_dim"],
        layers=(True,) * count,
        normalized=True,  # equal to a softmax over the chosen experts
        biased=True,
        gate_slope=float(1.702 if slope is None else slope),
        gate_limit=float(7.0 if limit is None else limit),
    )
    own = {"head_dim": int(config.get("head_dim") or 64), "norm_eps": float(1e-5 if eps is None else eps)}
    return ModelSpec(**{**facts, **own}, qkv_bias=bias, out_bias=bias, sinks=True, moe=moe)


def _halves(x: Array) -> Array:
    """Reorder [..., 2 * F] from interleaved gate and up to gate, then up."""
    return library(x).concatenate([x[..., ::2], x[..., 1::2]], axis=-1)  # type: ignore[no-any-return]


class Mixture(Moe):
    """A mixture of experts with all experts of a layer in one checkpoint tensor."""

    def matrices(self, spec: ModelSpec, prefix: str, leaves: tuple[str, ...]) -> tuple[nnx.Param[Info], ...]:
        e, f, x = spec.dim, self.moe.ff_dim, self.moe.experts
        return (
            _whole(prefix + "gate_up_proj", (x, e, 2 * f), ("experts", "dim", "pack"), _halves),
            _whole(prefix + "down_proj", (x, f, e), ("experts", "pack", "dim"), same),
        )

    def biases(self, spec: ModelSpec, prefix: str) -> tuple[nnx.Param[Info] | None, ...]:
        e, f, x = spec.dim, self.moe.ff_dim, self.moe.experts
        return (
            _whole(prefix + "gate_up_proj_bias", (x, 2 * f), ("experts", "pack"), _halves, 0.0),
            _whole(prefix + "down_proj_bias", (x, e), ("experts", "dim"), same, 0.0),
        )


def _whole(
    name: str, shape: tuple[int, ...], axes: tuple[str, ...], build: Callable[..., Array], init: float = 0.02
) -> nnx.Param[Info]:
    return nnx.Param(Info(shape, axes, (Source(name, shape),), build, init))


class Block(layers.Block):
    def feed_forward(self, prefix: str, index: int) -> Any:
        return Mixture(self.spec, prefix + "mlp.", router="router.")


Decoder = partial(layers.Decoder, block=Block)
