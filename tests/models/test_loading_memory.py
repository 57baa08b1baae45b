"""Host memory during loading: the weight being built, and little else."""

from __future__ import annotations

import tracemalloc
from math import prod
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.models import registry, weights
from jaxserve.models.layers import Info
from tests.support.models.driver import mesh

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 512, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "norm_topk_prob": True,
}  # fmt: skip


@pytest.mark.parametrize("name", [None, "int8", "fp8_per_block"])
def test_the_host_holds_one_weight_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    spec = registry.spec_from_config(CONFIG)
    infos = jax.tree.leaves(registry.abstract_weights(spec, "bfloat16"), is_leaf=lambda x: isinstance(x, Info))
    shapes = {source.name: source.shape for info in infos for source in info.sources}
    names, rng = list(shapes), np.random.default_rng(0)
    for i in range(4):
        held = {n: rng.standard_normal(shapes[n], np.float32).astype(ml_dtypes.bfloat16) for n in names[i::4]}
        save_file(held, tmp_path / f"{i}.safetensors")
    del held
    largest, whole = 2 * max(prod(info.shape) for info in infos), 2 * sum(map(prod, shapes.values()))
    monkeypatch.setattr(weights.jax, "device_put", lambda x, where: np.zeros(()))  # as if devices had their own memory

    def load() -> Any:
        return weights.load_weights(tmp_path, spec.quantized_as(name), "bfloat16", [mesh(1)])

    tracemalloc.start()
    try:
        load()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.25 * largest + (2 << 20) < whole / 2, (
        f"{peak} bytes for a largest weight of {largest}, {whole} in all"
    )
