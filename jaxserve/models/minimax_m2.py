"""MiniMax M2: experts with sigmoid scores in every layer, norms over all heads, RoPE on a part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.models import layers
from jaxserve.models.context_length import Config
from jaxserve.models.moe import Moe
from jaxserve.models.spec import Experts, ModelSpec, common, need


def read(config: Config) -> ModelSpec:
    facts = common(_partial(config), partials=True)
    return ModelSpec(**facts, qk_norm="all", moe=experts(config, facts, scoring="sigmoid", corrected=True))


def experts(config: Config, facts: Mapping[str, Any], **more: Any) -> Experts:
    """Return experts in every layer, as large as the dense feed-forward would be; `more`: other fields."""
    return Experts(
        experts=int(need(config, "num_local_experts")),
        chosen=int(need(config, "num_experts_per_tok")),
        ff_dim=facts["ff_dim"],
        layers=(True,) * facts["layers"],
        normalized=True,
        **more,
    )


def _partial(config: Config) -> Config:
    """Convert `rotary_dim` of published configs to `partial_rotary_factor`, as transformers saves it."""
    if config.get("rotary_dim") is None:
        return config
    share = int(config["rotary_dim"]) / int(need(config, "head_dim"))
    return {"partial_rotary_factor": share, **config}


class Block(layers.Block):
    def feed_forward(self, prefix: str, index: int) -> Any:
        return Moe(self.spec, prefix + "block_sparse_moe.", ("w1", "w3", "w2"))


Decoder = partial(layers.Decoder, block=Block)
