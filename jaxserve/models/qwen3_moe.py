"""Qwen 3 with a mixture of experts in some or all layers."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxserve.models import layers
from jaxserve.models.context_length import Config
from jaxserve.models.dense import qwen3
from jaxserve.models.moe import Moe
from jaxserve.models.spec import Experts, ModelSpec, need


def read(config: Config) -> ModelSpec:
    count, step = int(need(config, "num_hidden_layers")), int(config.get("decoder_sparse_step") or 1)
    dense = set(config.get("mlp_only_layers") or ())
    return qwen3(
        config,
        moe=Experts(
            experts=int(config.get("num_experts") or need(config, "num_local_experts")),
            chosen=int(need(config, "num_experts_per_tok")),
            ff_dim=int(need(config, "moe_intermediate_size")),
            normalized=bool(config.get("norm_topk_prob", False)),
            layers=tuple((i + 1) % step == 0 and i not in dense for i in range(count)),
        ),
    )


class Block(layers.Block):
    def feed_forward(self, prefix: str, index: int) -> Any:
        mixed = self.spec.moe is not None and self.spec.moe.layers[index]
        return Moe(self.spec, prefix + "mlp.") if mixed else super().feed_forward(prefix, index)


Decoder = partial(layers.Decoder, block=Block)
