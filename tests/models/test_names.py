"""Checkpoints whose tensors have other names: models with images, bare decoders, fused projections."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxserve.engine.runtime.checks import check_request
from jaxserve.models import registry
from jaxserve.models.names import lacks_head
from jaxserve.models.weights import WeightsError, load_weights
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.params import SamplingParams
from tests.support.models.configs import GEMMA, OPT, TOKENS
from tests.support.models.driver import SMALL, Driver, expected, fill, mesh, peer
from tests.support.server.double import Double

FEW = TOKENS[:16]
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def _renamed(path: Path, prefix: str, other: str, dropped: str = "nothing") -> None:
    """Rename the tensors of a checkpoint whose names start with `prefix`, and drop one."""
    tensors = load_file(path / "model.safetensors")
    named = {other + name.removeprefix(prefix) if name.startswith(prefix) else name: x for name, x in tensors.items()}
    save_file({name: x for name, x in named.items() if name != dropped}, path / "model.safetensors")


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_of_a_model_with_images_is_served(tmp_path: Path, prefix: str) -> None:
    torch.manual_seed(0)
    text = transformers.Gemma3TextConfig(**{**SMALL, **GEMMA}).to_dict()
    config = transformers.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    fill(model)
    model.save_pretrained(tmp_path)
    _renamed(tmp_path, "language_model.model.", prefix)
    _renamed(tmp_path, "vision_tower.", "vision_tower." if prefix.startswith("language") else "model.vision_tower.")
    np.testing.assert_allclose(Driver.of(tmp_path).feed(FEW), expected(model, FEW), atol=2e-4, rtol=0)


def test_a_text_config_means_what_transformers_fills_in(tmp_path: Path) -> None:
    """The published config of Gemma 3 4B says only in what it differs."""
    given = {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }  # fmt: skip
    names = {"architectures": ["Gemma3ForConditionalGeneration"]}
    whole = transformers.Gemma3Config(text_config={"model_type": "gemma3_text", **given}).to_dict()
    spec = registry.spec_from_config({**names, "text_config": given, "eos_token_id": [1, 106]})
    assert spec == registry.spec_from_config({**whole, **names, "eos_token_id": [1, 106], "dtype": None})
    assert (spec.heads, spec.kv_heads, spec.vocab, spec.rope.factor, spec.eos) == (8, 4, 262_208, 8.0, (1, 106))
    assert spec.max_positions == 131_072  # which the factor has already extended
    nulls = {**given, "rope_theta": None, "rope_local_base_freq": None, "head_dim": None}
    assert registry.spec_from_config({**names, "text_config": nulls, "eos_token_id": [1, 106]}) == spec
    with pytest.raises(InvalidValue, match="no 'text_config', which Gemma3ForConditionalGeneration needs"):
        registry.spec_from_config(names)


@pytest.mark.parametrize(
    ("family", "prefix", "changes"),
    [("Qwen3", "model.", {"head_dim": 16, "tie_word_embeddings": True}), ("OPT", "model.", OPT)],
)
def test_names_without_the_prefix_are_found(tmp_path: Path, family: str, prefix: str, changes: dict[str, Any]) -> None:
    model = peer(family, **changes)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    _renamed(tmp_path, prefix, "")
    np.testing.assert_allclose(Driver.of(tmp_path).feed(FEW), expected(model, FEW), atol=2e-4, rtol=0)


def test_a_checkpoint_without_a_head_gives_vectors(tmp_path: Path) -> None:
    """As Qwen3-Embedding-8B, and as `AutoModel` saves a decoder."""
    peer("Qwen3", head_dim=16).save_pretrained(tmp_path)  # type: ignore[operator]
    assert registry.load_spec(tmp_path).generates
    _renamed(tmp_path, "lm_head.weight", "lm_head.qweight")
    assert registry.load_spec(tmp_path).generates
    _renamed(tmp_path, "model.", "", dropped="lm_head.qweight")
    spec = registry.load_spec(tmp_path)
    assert not spec.generates
    info = replace(Double().info, generates=spec.generates)
    check_request(info, [1], SamplingParams(max_tokens=1, pooling="last"))
    with pytest.raises(InvalidValue, match="model double has no output head, so it gives vectors only: ask /v1/emb"):
        check_request(info, [1], SamplingParams(max_tokens=1))
    assert Driver.of(tmp_path).feed(FEW).shape == (16, 96)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3Model"]}))
    assert registry.load_spec(tmp_path) == spec


@pytest.mark.parametrize("content", [b"", b"hello", b"[]", b'{"a":' * 10_000 + b"1" + b"}" * 10_000])
def test_damaged_files_do_not_look_like_bare_decoders(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(content)) + content)
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert not lacks_head(tmp_path)


@pytest.mark.parametrize(
    ("dropped", "message"),
    [("model.layers.1.mlp.down_proj.weight", "missing model.layers.1.mlp.down_proj.weight"), ("", "unexpected score")],
)
def test_other_names_are_reported(tmp_path: Path, dropped: str, message: str) -> None:
    peer("Phi3", pad_token_id=None).save_pretrained(tmp_path)  # type: ignore[operator]
    _renamed(tmp_path, "model.norm.weight", "score.weight" if not dropped else "model.norm.weight", dropped)
    with pytest.raises(WeightsError, match=message):
        Driver.of(tmp_path)


def test_a_fused_tensor_of_another_size_is_named(tmp_path: Path) -> None:
    peer("Phi3", pad_token_id=None).save_pretrained(tmp_path)  # type: ignore[operator]
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    save_file({**tensors, name: tensors[name][:-8].copy()}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"unexpected {name} \[56, 32\]"):
        Driver.of(tmp_path)


@pytest.mark.parametrize("quantization", [None, "int8", "fp8_per_block"])
def test_fused_tensors_load_as_their_parts(tmp_path: Path, quantization: str | None) -> None:
    peer("Phi3", pad_token_id=None).save_pretrained(tmp_path)  # type: ignore[operator]
    spec = registry.load_spec(tmp_path).quantized_as(quantization).for_tp(2)
    fused = load_weights(tmp_path, spec, "float32", [mesh(2)])[0]
    parts = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        cuts, leaves = {"qkv_proj": ([32, 48], "qkv"), "gate_up_proj": ([64], ("gate", "up"))}.get(
            name.split(".")[-2], ([], ())
        )
        for leaf, part in zip(leaves, np.split(tensor, cuts), strict=False):
            parts[".".join([*name.split(".")[:-2], f"{leaf}_proj", "weight"])] = part.copy()
        parts |= {} if leaves else {name: tensor}
    assert len(parts) == 2 * 9 + 3
    save_file(parts, tmp_path / "model.safetensors")
    whole = load_weights(tmp_path, spec, "float32", [mesh(2)])[0]
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), fused, whole))


def test_a_checkpoint_in_float16_is_read_exactly(tmp_path: Path) -> None:
    peer("Llama").half().save_pretrained(tmp_path)  # type: ignore[operator]
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert registry.load_spec(tmp_path).dtype == "float16"
    np.testing.assert_allclose(Driver.of(tmp_path).feed(FEW), expected(model, FEW), atol=2e-4, rtol=0)
