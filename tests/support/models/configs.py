"""Small random configs of every family."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.models.driver import Ints

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA: dict[str, Any] = {
    "head_dim": 16, "sliding_window": 5, "tie_word_embeddings": True, "num_hidden_layers": 3,
    "query_pre_attn_scalar": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = {
    "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip
MINIMAX: dict[str, Any] = {
    "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 5, "intermediate_size": 24,
    "rope_parameters": {**YARN, "truncate": False},
}  # fmt: skip
# A latent wider than its rotary part, a yarn that sharpens scores, a dense first layer, groups,
# shared experts.
DEEPSEEK: dict[str, Any] = {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 3, "moe_intermediate_size": 12, "routed_scaling_factor": 1.5, "topk_method": "greedy",
    "n_group": 1, "topk_group": 1, "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
DEEPSEEK3 = {**DEEPSEEK, "topk_method": None, "q_lora_rank": 20, "norm_topk_prob": True, "n_group": 4, "topk_group": 2}
OPT: dict[str, Any] = {"ffn_dim": 64, "word_embed_proj_dim": 32, "tie_word_embeddings": True}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
GEMMA2: dict[str, Any] = {
    "head_dim": 16, "sliding_window": 5, "tie_word_embeddings": True, "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
}  # fmt: skip
GLM: dict[str, Any] = {"head_dim": 16, "pad_token_id": None}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.0625, "residual_multiplier": 0.22, "logits_scaling": 8.0,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}
OLMO3: dict[str, Any] = {
    "num_hidden_layers": 4, "sliding_window": 5, "pad_token_id": None,
    "rope_parameters": {"full_attention": {**YARN}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
}  # fmt: skip
QWEN3_NEXT: dict[str, Any] = {
    "head_dim": 16, "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "rms_norm_eps": 1e-4,
}  # fmt: skip
PHI3: dict[str, Any] = {"pad_token_id": None}
SMOLLM3: dict[str, Any] = {"num_hidden_layers": 4, "pad_token_id": None}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3, biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "qwen2 tied, yarn": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3, own head_dim": ("Qwen3", {"head_dim": 16}),
    "gemma3": ("Gemma3", GEMMA),
    "opt": ("OPT", OPT),
    "qwen3-moe": ("Qwen3Moe", QWEN3_MOE),
    "minimax-m2": ("MiniMaxM2", MINIMAX),
    "deepseek-v2, groups, a latent of queries": ("DeepseekV2", {**DEEPSEEK, **GROUPS, "q_lora_rank": 20}),
    "gpt-oss": ("GptOss", GPT_OSS),
    "odd vocabulary": ("Llama", {"vocab_size": 97}),
    "granite": ("Granite", {**GRANITE, "tie_word_embeddings": True}),
    "glm4": ("Glm4", GLM),
    "olmo3": ("Olmo3", OLMO3),
    "smollm3": ("SmolLM3", SMOLLM3),
    "qwen3-next": ("Qwen3Next", QWEN3_NEXT),
}
FULL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "llama yarn": ("Llama", {"rope_parameters": YARN}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama one kv head": ("Llama", {"num_key_value_heads": 1, "head_dim": 32}),
    "llama as many kv heads": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, a window of 5": ("Mistral", {"sliding_window": 5}),
    "qwen2, a window from layer 1 on": (
        "Qwen2",
        {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "gemma3, every other layer": (
        "Gemma3",
        {**GEMMA, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma3, a soft cap": (
        "Gemma3",
        {**GEMMA, "final_logit_softcapping": 2.0},
    ),  # transformers omits that of scores
    "qwen3-moe, a dense layer, weights as they come": (
        "Qwen3Moe",
        {**QWEN3_MOE, "norm_topk_prob": False, "mlp_only_layers": [0]},
    ),
    "qwen3-moe, a window of 5 in every layer": (
        "Qwen3Moe",
        {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "deepseek-v2-lite": ("DeepseekV2", DEEPSEEK),
    "deepseek-v2, dense layers only, tied": (
        "DeepseekV2",
        {
            **DEEPSEEK,
            "first_k_dense_replace": 3,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default"},
        },
    ),
    "deepseek-v2, one expert, no scaling": (
        "DeepseekV2",
        {**DEEPSEEK, "num_experts_per_tok": 1, "routed_scaling_factor": 1.0, "n_shared_experts": 1},
    ),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK3),
    "deepseek-v3, weights as they come, halves turn": (
        "DeepseekV3",
        {
            **DEEPSEEK3,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "q_lora_rank": None,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        },
    ),
    "gpt-oss, every layer slides, no biases": (
        "GptOss",
        {**GPT_OSS, "layer_types": ["sliding_attention"] * 2, "attention_bias": False},
    ),
    "gpt-oss, tight limit": ("GptOss", {**GPT_OSS, "swiglu_limit": 0.2, "swiglu_alpha": 1.1, "num_key_value_heads": 4}),
    "opt, untied": ("OPT", {**OPT, "tie_word_embeddings": False}),
    "qwen3 tied, biases": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
    "odd vocabulary, tied": ("Qwen2", {"vocab_size": 97, "tie_word_embeddings": True}),
    "phi3": ("Phi3", PHI3),
    "gemma2": ("Gemma2", GEMMA2),
    "mixtral": ("Mixtral", MIXTRAL),
    "phi3, a part turns, a window of 5": (
        "Phi3",
        {**PHI3, "sliding_window": 5, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.75}, "head_dim": 16},
    ),
    "phi3, longrope": (
        "Phi3",
        {
            **PHI3,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "long_factor": [1.0, 1.5, 4.0, 8.0],
                "short_factor": [1.0, 1.0, 1.2, 2.0],
            },
        },
    ),
    "phi3, longrope on a part": (
        "Phi3",
        {
            **PHI3,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "long_factor": [1.0, 4.0],
                "short_factor": [1.0, 1.2],
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "glm4, yarn": ("Glm4", {**GLM, "rope_parameters": YARN}),
    "glm4, yarn on a part": ("Glm4", {**GLM, "rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}),
    "granite, biases": ("Granite", {**GRANITE, "attention_bias": True, "mlp_bias": True}),
    "glm, one kv head": ("Glm", {**GLM, "num_key_value_heads": 1}),
    "glm4, all of a head turns": ("Glm4", {**GLM, "rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}}),
    "gemma2, untied": ("Gemma2", {**GEMMA2, "tie_word_embeddings": False, "num_hidden_layers": 3}),
    "olmo2": ("Olmo2", {"pad_token_id": None}),
    "olmo2, as many kv heads, biases": (
        "Olmo2",
        {"pad_token_id": None, "num_key_value_heads": 4, "attention_bias": True},
    ),
    "olmo2, one kv head": ("Olmo2", {"pad_token_id": None, "num_key_value_heads": 1}),
    "smollm3, untied, a window where nothing turns": (
        "SmolLM3",
        {**SMOLLM3, "sliding_window": 5, "use_sliding_window": True, "no_rope_layer_interval": 2},
    ),
    "mixtral, a window of 5": ("Mixtral", {**MIXTRAL, "sliding_window": 5}),
    "eight heads": ("Qwen3", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}),
}
TOKENS: Ints = np.random.default_rng(0).integers(0, 96, 48).astype(np.int32)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
}
