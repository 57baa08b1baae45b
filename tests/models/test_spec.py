"""Configs become numbers, or an error that names the value and what is supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxserve.models import registry
from jaxserve.models.layers import Info
from jaxserve.models.registry import spec_from_config
from jaxserve.sched.errors import InvalidValue

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], **SIZES}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: "-".join(map(str, rope.values())))
def test_rotary_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(
        **SIZES, head_dim=64, max_position_embeddings=2048, rope_parameters={"rope_theta": 5e5, **rope}
    )
    spec = spec_from_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    if rope["rope_type"] == "default":
        want, scale = 5e5 ** -(np.arange(0, 64, 2) / 64), 1.0
    else:
        want, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu", seq_len=2048)
    np.testing.assert_allclose(spec.rope.frequencies(64), np.asarray(want), rtol=2e-6)
    assert spec.rope.scale == pytest.approx(scale)


def test_the_older_spelling_of_rope_is_read() -> None:
    config = {
        **LLAMA,
        "rope_theta": 5e5,
        "max_position_embeddings": 256,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    spec = spec_from_config(config)
    assert (spec.rope.kind, spec.rope.theta, spec.rope.factor, spec.max_positions) == ("linear", 5e5, 2.0, 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["FooForCausalLM"]}, r"'FooForCausalLM' is not supported; supported: LlamaForCausalLM, "),
        ({"architectures": []}, "no 'architectures'"),
        ({"hidden_size": None}, "no 'hidden_size', which LlamaForCausalLM needs"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported is 'silu'"),
        ({"sliding_window": 4096}, "sliding_window=4096.* supported is full attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types=\['sliding_attention'\]"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope' is not supported; supported: default,"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type='linear' needs 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "method 'awq' is not supported"),
        ({"num_key_value_heads": 3}, "heads=4 must be a multiple of kv_heads=3"),
        ({"num_hidden_layers": 0}, "layers=0 must be at least 1"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"hidden_size": "wide"}, "a value of the wrong kind: .*'wide'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, r"per layer type \(full_attention\)"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        spec_from_config({**LLAMA, **changes})


def test_a_window_that_is_switched_off_is_accepted() -> None:
    spec = spec_from_config(
        {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": False}
    )
    assert spec.qkv_bias and not spec.out_bias


def test_eos_comes_from_both_configs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert registry.load_spec(tmp_path).eos == (2, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "config.json' is missing; expected a folder"), ("{", "is not valid JSON"), ("[]", "list")],
)
def test_a_bad_config_file_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidValue, match=message):
        registry.load_spec(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="nowhere' does not exist; expected a folder of a Hugging Face model"):
        registry.load_spec(tmp_path / "nowhere")


@pytest.mark.parametrize(("tp", "copies", "heads"), [(1, 1, 2), (2, 1, 2), (4, 2, 4)])
def test_kv_heads_are_copied_where_shards_outnumber_them(tp: int, copies: int, heads: int) -> None:
    spec = spec_from_config(LLAMA).for_tp(tp)
    assert (spec.kv_copies, spec.pool_heads) == (copies, heads)
    assert registry.pool_shape(spec, 10, 16) == (10, 16, heads, 8)


@pytest.mark.parametrize("tp", [0, 3, 8])
def test_a_tensor_parallel_size_that_does_not_fit_is_named(tp: int) -> None:
    with pytest.raises(InvalidValue, match=f"tensor parallel size {tp} does not fit LlamaForCausalLM: .*heads=4"):
        spec_from_config(LLAMA).for_tp(tp)


def test_one_tree_describes_every_weight() -> None:
    spec = spec_from_config({**LLAMA, "tie_word_embeddings": True})
    tree = registry.abstract_weights(spec, "bfloat16")
    assert set(tree) == {"embed", "layers", "norm"}
    infos = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Info))
    names = [source.name for info in infos for source in info.sources]
    assert len(names) == len(set(names)) == 2 + 2 * 9
    layer = tree["layers"][1]["attention"]["qkv"]
    assert (layer.shape, layer.axes) == ((32, 2, 4 * 8), ("dim", "heads", "pack"))
    assert [source.name.split(".", 2)[2] for source in layer.sources] == [f"1.self_attn.{x}_proj.weight" for x in "qkv"]
