"""Model configs become specs, or an error names the value and what is supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
import transformers
from jax.sharding import PartitionSpec
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxserve.models import registry
from jaxserve.models.layers import Info, Source
from jaxserve.models.registry import spec_from_config
from jaxserve.sched.api.errors import InvalidValue

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
MLA: dict[str, Any] = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8,
}  # fmt: skip
GROUPED = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
OSS = {"num_local_experts": 4, "num_experts_per_tok": 2}
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
def test_rotary_frequencies_match_transformers(rope: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])  # the last two: older spellings
def test_longrope_depends_on_the_length_of_contexts(kind: str) -> None:
    long, short = ([1.0 + step * pair for pair in range(12)] for step in (0.5, 0.1))
    rope = {"type": kind, "long_factor": long, "short_factor": short}
    turned = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, **rope}
    config = transformers.Phi3Config(
        **{**SIZES, "hidden_size": 128}, max_position_embeddings=4096, original_max_position_embeddings=1024,
        pad_token_id=0, rope_parameters=turned,
    )  # fmt: skip
    given = {**SIZES, "architectures": ["Phi3ForCausalLM"], "head_dim": 32, "max_position_embeddings": 4096}
    given |= {"rope_scaling": rope, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 1024}
    spec = spec_from_config(given)
    for length in (1024, 1025, 4096):
        want, scale = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=length)
        turning = spec.for_length(length).rope
        np.testing.assert_allclose(turning.frequencies(32), np.pad(np.asarray(want), (0, 4)), rtol=2e-6)
        assert turning.scale == pytest.approx(scale)


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
        (
            {"architectures": ["FooForCausalLM"]},
            r"'FooForCausalLM' is not supported; supported: DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, ",
        ),
        ({"architectures": []}, "no 'architectures'"),
        ({"hidden_size": None}, "no 'hidden_size', which LlamaForCausalLM needs"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported is 'silu'"),
        ({"sliding_window": 4096}, "sliding_window=4096.* supported is full attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types=\['sliding_attention'\]"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_type='mrope' is not supported; supported: default,"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope' needs 'long_factor'"),
        ({"rope_parameters": {"type": "su", "long_factor": [1.0], "short_factor": [1.0]}}, "must have 4 numbers each"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type='linear' needs 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"hidden_size": "wide"}, "a value of the wrong kind: .*'wide'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, r"per layer type \(full_attention\)"),
    ],
)
def test_unsupported_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        spec_from_config({**LLAMA, **changes})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("OPT", {"ffn_dim": 64, "do_layer_norm_before": False}, "do_layer_norm_before=False is not supported"),
        ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 16}, "word_embed_proj_dim=16 .* supported is hidden_size=32"),
        ("OPT", {"ffn_dim": 64, "activation_function": "gelu"}, "activation_function='gelu' .* supported is 'relu'"),
        ("OPT", {}, "no 'ffn_dim', which OPTForCausalLM needs"),
        ("Gemma3", {"hidden_activation": "relu"}, "hidden_activation='relu' .* supported is 'gelu_pytorch_tanh'"),
        ("Gemma3", {"layer_types": ["chunked_attention"] * 2, "sliding_window": 4}, r"\['chunked_attention'\]"),
        ("Gemma3", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 0}, "sliding_window=0 must be at"),
        ("Gemma3", {"layer_types": ["sliding_attention"], "sliding_window": 4}, "self.layers=2"),
        ("Granite", {"residual_multiplier": float("inf")}, "must be finite"),
        ("Granite", {"logits_scaling": 0.0}, "must be finite"),
        ("SmolLM3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0 must be at least 1"),
        ("SmolLM3", {"no_rope_layers": [1]}, r"no_rope_layers has 1 layers, num_hidden_layers=2"),
        ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 5}, "5 of 4 experts"),
        ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 8}, "no 'num_experts_per_tok'"),
        ("MiniMaxM2", {"num_local_experts": 4, "num_experts_per_tok": 2, "partial_rotary_factor": 2}, "factor=2.0 is"),
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ("DeepseekV2", {**MLA, "topk_method": "noaux_tc"}, "'noaux_tc' .* supported: 'greedy', 'group_limited_greedy'"),
        ("DeepseekV2", {**MLA, "topk_method": "group_limited_greedy"}, "no 'n_group', which DeepseekV2ForCausalLM"),
        ("DeepseekV2", {**MLA, **GROUPED, "n_group": 3}, "2 experts per token from 1 of 3 groups of 8 experts: groups"),
        ("DeepseekV2", {**MLA, **GROUPED, "num_experts_per_tok": 5}, "5 experts per token from 1 of 2 groups"),
        ("DeepseekV2", {**MLA, **GROUPED, "topk_group": 3}, "2 experts per token from 3 of 2 groups"),
        ("DeepseekV2", {**MLA, "norm_topk_prob": True}, "norm_topk_prob=True .*DeepseekV2.*; supported is False"),
        ("DeepseekV2", {**MLA, "scoring_func": "sigmoid"}, "scoring_func='sigmoid' .*; supported is 'softmax'"),
        ("DeepseekV2", {**MLA, "attention_bias": True}, "attention_bias=True is not supported"),
        ("DeepseekV2", {**MLA, "moe_layer_freq": 2}, "moe_layer_freq=2 .*; supported is 1"),
        ("DeepseekV2", {**MLA, "qk_rope_head_dim": 3}, "turned=3.*: each must be at least 1, and turned"),
        ("DeepseekV2", {**MLA, "kv_lora_rank": None}, "no 'kv_lora_rank', which DeepseekV2ForCausalLM needs"),
        ("DeepseekV3", {**MLA, **GROUPED, "topk_method": "greedy"}, "topk_method='greedy' .* supported: 'noaux_tc'"),
        ("DeepseekV3", {**MLA, **GROUPED, "topk_method": None, "n_group": 8}, "2 experts per token from 1 of 8 groups"),
        ("GptOss", {**OSS, "quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported"),
        ("GptOss", {**OSS, "layer_types": ["chunked_attention"] * 2}, r"\['chunked_attention'\]"),
        ("GptOss", {"num_experts_per_tok": 2}, "no 'num_experts', which GptOssForCausalLM needs"),
    ],
)
def test_unsupported_features_of_a_family_are_named(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        spec_from_config({**SIZES, "architectures": [f"{name}ForCausalLM"], **changes})


def test_sizes_of_a_text_config_are_checked() -> None:
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"num_hidden_layers": 10**9}}
    with pytest.raises(InvalidValue, match="num_hidden_layers=1000000000 must be at most 1024"):
        spec_from_config(config)


def test_experts_divide_among_shards() -> None:
    experts = {"num_experts": 6, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    spec = spec_from_config({**SIZES, "architectures": ["Qwen3MoeForCausalLM"], **experts})
    assert spec.for_tp(2).moe == spec.moe
    with pytest.raises(InvalidValue, match="4 does not fit Qwen3MoeForCausalLM: it must divide its 6 experts"):
        spec.for_tp(4)


def test_windows_follow_the_spelling_of_each_family() -> None:
    """Windows are set by layer types, by a pattern, from a layer on, or in every layer."""
    sizes = {**SIZES, "num_hidden_layers": 4, "sliding_window": 8}
    experts = {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    for name, changes, want in (
        ("Mistral", {}, (8, 8, 8, 8)),
        ("Mistral", {"sliding_window": None}, (None,) * 4),
        ("Phi3", {"sliding_window": 2048, "max_position_embeddings": 2048}, (None,) * 4),
        ("Phi3", {"sliding_window": 2047, "max_position_embeddings": 2048}, (2047,) * 4),
        ("Qwen2", {"use_sliding_window": False}, (None,) * 4),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 8)),
        ("Qwen3Moe", {**experts, "use_sliding_window": True, "max_window_layers": 3}, (8, 8, 8, 8)),
        ("Gemma3", {"sliding_window_pattern": 2}, (8, None, 8, None)),
        ("Gemma3", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, (None, None, None, 8)),
    ):
        spec = spec_from_config({**sizes, "architectures": [f"{name}ForCausalLM"], **changes})
        assert tuple(map(spec.window_of, range(4))) == want
        assert set(spec.windows) == set(want)


def test_non_rotary_dimensions_come_last() -> None:
    spec = spec_from_config(
        {
            **SIZES, "architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
            "head_dim": 8, "rotary_dim": 4,
        }
    )  # fmt: skip
    assert spec.rope.order(8).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    np.testing.assert_allclose(spec.rope.frequencies(8), [1.0, 0.01, 0.0, 0.0], rtol=1e-6)


def test_eos_comes_from_both_configs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert registry.load_spec(tmp_path).eos == (2, 7)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"eos_token": "<|im_end|>", "added_tokens_decoder": {"5": {"content": "<|im_end|>"}}}, (2, 5)),
        ({"eos_token": {"content": "</s>"}, "added_tokens_decoder": {"2": {"content": "</s>"}}}, (2,)),
        ({"eos_token": "b"}, (2, 1)),  # in the vocabulary of tokenizer.json alone
        ({"eos_token": "<|far|>", "added_tokens_decoder": {"100000": {"content": "<|far|>"}}}, (2,)),  # no logit has it
        ({"eos_token": "unknown"}, (2,)),
        ({"eos_token": None}, (2,)),
    ],
)
def test_the_tokenizers_eos_ends_a_text_too(tmp_path: Path, given: dict[str, Any], expected: tuple[int, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    vocabulary = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    vocabulary.save(str(tmp_path / "tokenizer.json"))
    assert registry.load_spec(tmp_path).eos == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "config.json' is missing; expected a folder"), ("{", "is not valid JSON"), ("[]", "list")],
)
def test_an_invalid_config_file_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidValue, match=message):
        registry.load_spec(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="nowhere' does not exist; expected a folder of a Hugging Face model"):
        registry.load_spec(tmp_path / "nowhere")


@pytest.mark.parametrize(("tp", "copies", "heads"), [(1, 1, 2), (2, 1, 2), (4, 2, 4)])
def test_kv_heads_are_replicated_if_there_are_more_shards(tp: int, copies: int, heads: int) -> None:
    spec = spec_from_config(LLAMA).for_tp(tp)
    assert (spec.kv_copies, spec.pool_heads) == (copies, heads)
    assert spec.cache.shape(10, 16) == (10, 16, heads, 8)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_latent_is_one_array_replicated_on_each_shard(tp: int) -> None:
    spec = spec_from_config({**SIZES, **MLA, "architectures": ["DeepseekV2ForCausalLM"]}).for_tp(tp)
    assert spec.cache.latent and spec.cache.shape(10, 16) == (10, 16, tp, 16 + 4)
    assert spec.cache.kv_buffer_shape(3, 16) == (2, 1, 3, 16, tp, 20)
    assert spec.cache.page_bytes(16, "bfloat16") == 2 * 16 * tp * 20 * 2
    assert spec.cache.page_bytes(16, "int8") == 2 * 16 * tp * 20


def test_yarn_scales_the_scores_of_latent_attention() -> None:
    """With DeepSeek-V2-Lite's values, the two factors of cos and sin cancel and that of the scores stays."""
    rope = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    scaled = {"rope_scaling": {**rope, "mscale": 0.707, "mscale_all_dim": 0.707}, "max_position_embeddings": 163840}
    spec = spec_from_config({**SIZES, **MLA, **scaled, "architectures": ["DeepseekV2ForCausalLM"]})
    assert (spec.rope.scale, spec.max_positions) == (1.0, 163840)
    assert spec.scale == pytest.approx(12**-0.5 * (0.0707 * np.log(40) + 1) ** 2)


def test_the_router_bias_stays_in_float32() -> None:
    minimax = {"num_local_experts": 4, "num_experts_per_tok": 2, "architectures": ["MiniMaxM2ForCausalLM"]}
    v3 = {**MLA, "n_group": 2, "topk_group": 1, "architectures": ["DeepseekV3ForCausalLM"]}
    for config in (minimax, v3):
        tree = registry.abstract_weights(spec_from_config({**SIZES, **config}), "bfloat16")
        mlp = tree["layers"][0]["mlp"]
        assert (mlp["correction"].dtype, mlp["router"].dtype) == ("float32", "bfloat16")


def test_the_docs_name_every_architecture() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "models.md").read_text(encoding="utf-8")
    assert [name for name in registry.FAMILIES if f"`{name}`" not in page] == []


@pytest.mark.parametrize("tp", [0, 3, 8])
def test_a_tensor_parallel_size_that_does_not_fit_is_named(tp: int) -> None:
    with pytest.raises(InvalidValue, match=f"tensor parallel size {tp} does not fit LlamaForCausalLM: .*heads=4"):
        spec_from_config(LLAMA).for_tp(tp)


@pytest.mark.parametrize(("tp", "padding"), [(1, 0), (2, 1), (4, 3)])
def test_a_vocabulary_is_padded_so_that_shards_divide_it(tp: int, padding: int) -> None:
    spec = spec_from_config({**LLAMA, "vocab_size": 97}).for_tp(tp)
    assert spec.vocab_padding == padding and spec.for_tp(tp) == spec
    tree = registry.abstract_weights(spec, "float32")
    assert tree["embed"].shape == tree["head"].shape == (97 + padding, 32)
    assert tree["head"].partition(tp) == PartitionSpec("tp", None)
    built = tree["head"].build(np.ones((97, 32), np.float32))
    assert built.shape == tree["head"].shape and not built[97:].any()


def test_two_weight_axes_on_one_mesh_axis_are_both_named() -> None:
    with pytest.raises(InvalidValue, match=r"of a\.weight: axes 'heads' and 'ff' would both be split over .* 'tp'"):
        Info((4, 8), ("heads", "ff"), (Source("a.weight", (8, 4)),), lambda x: x)
    with pytest.raises(InvalidValue, match=r"of a\.weight: 1 axes \('heads',\) for 2 dimensions"):
        Info((4, 8), ("heads",), (Source("a.weight", (8, 4)),), lambda x: x)


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
