"""Random models of every family."""

from __future__ import annotations

from functools import cache
from typing import Any

from jaxserve.models import registry
from tests.support.parity.law import LENGTH, Model

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 256, "max_position_embeddings": LENGTH, "eos_token_id": 7,
    "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV2": {
        "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
        "first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1,
        "routed_scaling_factor": 1.5,
    },
    "DeepseekV3": {
        "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1,
    },
    "Gemma2": {
        "sliding_window": 20, "query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 20.0,
    },
    "Gemma3": {
        "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "Glm": {},
    "Glm4": {},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20},
    "Granite": {"embedding_multiplier": 4.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "MiniMaxM2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "Mistral": {"sliding_window": 20},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "OPT": {"ffn_dim": 96},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    "Phi3": {"sliding_window": 20},
    "Qwen2": {},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "Qwen3Next": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 24,
        "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "full_attention_interval": 2,
    },
    "SmolLM3": {"no_rope_layer_interval": 2},
}  # fmt: skip


@cache
def model(name: str) -> Model:
    return Model(registry.spec_from_config({**SIZES, **FAMILIES[name], "architectures": [f"{name}ForCausalLM"]}))
