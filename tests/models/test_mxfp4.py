"""MXFP4 weights: equal to transformers' dequantization, and loaded like bfloat16 ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file, save_file

from jaxserve.models.dummy import random_weights
from jaxserve.models.packed.mxfp4 import dequantized
from jaxserve.models.registry import load_spec
from jaxserve.models.weights import WeightsError, load_weights
from tests.support.models.configs import GPT_OSS, TOKENS
from tests.support.models.driver import Driver, expected, mesh, peer

WIDTH = {**GPT_OSS, "intermediate_size": 32, "num_hidden_layers": 1}  # whole blocks of 32 in both dimensions


def packed(experts: int, outputs: int, inputs: int, seed: int = 0) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
    return blocks, rng.integers(122, 127, blocks.shape[:-1]).astype(np.uint8)


def by_transformers(blocks: npt.NDArray[Any], scales: npt.NDArray[Any]) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # slow, and every worker imports this file

    values: torch.Tensor = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    return values


def test_every_byte_with_every_exponent_matches_transformers() -> None:
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16), (2, 120, 16, 16)).copy()
    scales = np.broadcast_to(np.arange(5, 245, dtype=np.uint8).reshape(2, 120, 1), (2, 120, 16)).copy()
    want = by_transformers(blocks, scales).numpy()
    got = dequantized(blocks, scales)
    assert got.dtype == ml_dtypes.bfloat16 and got.shape == (2, 512, 120)
    np.testing.assert_array_equal(got.astype(np.float32), want)


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, Any]:
    """A checkpoint with packed experts, and a transformers model with the dequantized weights."""
    model = peer("GptOss", **WIDTH)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for i, name in enumerate([name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]):
        whole = tensors.pop(name)
        blocks, scales = packed(whole.shape[0], whole.shape[2], whole.shape[1], i)
        tensors |= {name + "_blocks": blocks, name + "_scales": scales}
        with torch.no_grad():
            model.get_parameter(name).copy_(by_transformers(blocks, scales))
    save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return tmp_path, model


def test_a_packed_checkpoint_gives_the_logits_of_its_weights(folder: tuple[Path, Any]) -> None:
    path, model = folder
    got = Driver.of(path, tp=2).feed(TOKENS[:16])
    np.testing.assert_allclose(got, expected(model, TOKENS[:16]), atol=2e-4, rtol=0)


def test_mismatched_blocks_and_scales_are_named(folder: tuple[Path, Any]) -> None:
    path, name = folder[0], "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(path / "model.safetensors")
    tensors[name + "_scales"] = tensors[name + "_scales"][:, 1:].copy()
    save_file(tensors, path / "model.safetensors")
    spec = load_spec(path)
    with pytest.raises(
        WeightsError, match=rf"(?s)missing {name} .*unexpected {name}_blocks .*unexpected {name}_scales"
    ):
        load_weights(path, spec, "float32", [mesh(1)])


def test_dummy_weights_need_no_blocks(folder: tuple[Path, Any]) -> None:
    spec = load_spec(folder[0])
    (tree,) = random_weights(spec, "bfloat16", [mesh(1)])
    assert all(bool(np.isfinite(np.asarray(leaf, np.float32)).all()) for leaf in jax.tree.leaves(tree))
