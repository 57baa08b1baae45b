"""The GGUF file that benchmarks/compare.py writes for llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

gguf = pytest.importorskip("gguf", reason="gguf is not installed; pip install '.[bench]'")

CONFIG = {
    "model_type": "llama",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 20,
    "vocab_size": 30,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    "eos_token_id": None,
}
LAYER = {  # GGUF's name and shape
    "self_attn.q_proj": ("attn_q", (24, 24)),
    "self_attn.k_proj": ("attn_k", (8, 24)),
    "self_attn.v_proj": ("attn_v", (8, 24)),
    "self_attn.o_proj": ("attn_output", (24, 24)),
    "mlp.gate_proj": ("ffn_gate", (20, 24)),
    "mlp.up_proj": ("ffn_up", (20, 24)),
    "mlp.down_proj": ("ffn_down", (24, 20)),
    "input_layernorm": ("attn_norm", (24,)),
    "post_attention_layernorm": ("ffn_norm", (24,)),
}
REST = {
    "model.embed_tokens": ("token_embd", (30, 24)),
    "model.norm": ("output_norm", (24,)),
    "lm_head": ("output", (30, 24)),
}
NAMES = REST | {
    f"model.layers.{layer}.{name}": (f"blk.{layer}.{theirs}", shape)
    for layer in range(2)
    for name, (theirs, shape) in LAYER.items()
}


@pytest.fixture
def writer(repo: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(repo / "benchmarks"))
    from compare_bench import gguf_file

    return gguf_file


def model(folder: Path, config: dict[str, Any] | None = None, **tensors: np.ndarray) -> Path:
    """Write a Llama with random bfloat16 weights, and extra tensors if given."""
    rng = np.random.default_rng(0)
    weights = {
        f"{name}.weight": rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, (_, shape) in NAMES.items()
    }
    folder.mkdir(exist_ok=True)
    save_file({**weights, **tensors}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    return folder


def test_tensors_keep_their_values_and_q_and_k_are_permuted(writer: Any, tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    found = {one.name: one for one in gguf.GGUFReader(writer.write(folder, tmp_path / "model.gguf")).tensors}
    assert set(found) == {f"{theirs}.weight" for theirs, _ in NAMES.values()}
    original = load_file(folder / "model.safetensors")
    rows = np.array([[pair, pair + 4] for pair in range(4)]).ravel()  # sources of llama.cpp's rows of a head
    for name, (theirs, shape) in NAMES.items():
        tensor, expected = found[f"{theirs}.weight"], original[f"{name}.weight"].astype(np.float32)
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32 and tensor.data.shape == shape
        if name.endswith(("q_proj", "k_proj")):
            expected = np.concatenate([head[rows] for head in expected.reshape(-1, 8, 24)])
        np.testing.assert_array_equal(tensor.data, expected, err_msg=name)


def test_metadata_and_vocabulary(writer: Any, tmp_path: Path) -> None:
    path = writer.write(model(tmp_path / "model", {"eos_token_id": [7, 3]}), tmp_path / "model.gguf")
    fields = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    expected = {
        "context_length": 64,
        "embedding_length": 24,
        "block_count": 2,
        "feed_forward_length": 20,
        "attention.head_count": 3,
        "attention.head_count_kv": 1,
        "attention.key_length": 8,
        "attention.value_length": 8,
        "rope.dimension_count": 8,
        "rope.freq_base": 5000.0,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
        "vocab_size": 30,
    }
    assert fields["general.architecture"] == "llama"
    assert {name: fields[f"llama.{name}"] for name in expected} == expected
    tokens = fields["tokenizer.ggml.tokens"]
    assert len(set(tokens)) == 30 and all(tokens), "two tokens have the same text"
    assert fields["tokenizer.ggml.eos_token_id"] == 7 and fields["tokenizer.ggml.add_bos_token"] is False


def test_models_that_llama_cpp_would_misread_are_refused(writer: Any, tmp_path: Path) -> None:
    biased = model(tmp_path / "biased", **{"model.layers.0.self_attn.q_proj.bias": np.zeros(24, ml_dtypes.bfloat16)})
    scaled = model(tmp_path / "scaled", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}})
    other = model(tmp_path / "other", {"model_type": "qwen3"})
    for folder, why in ((biased, "q_proj.bias"), (scaled, "'llama3'"), (other, "'qwen3'")):
        with pytest.raises(ValueError, match=why):
            writer.write(folder, tmp_path / "model.gguf")
