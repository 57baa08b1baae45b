"""Which keys of a config.json are read, which change no logit, and which are refused.

A key that is in none of the tables, and set, is named in the log: it may be one that changes the mathematics of
a newer model. `tests/models/test_config_keys.py` sets every key that transformers writes to other values.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from jaxserve.models.context_length import Config
from jaxserve.models.spec import architecture
from jaxserve.sched.api.errors import InvalidValue, short

log = logging.getLogger(__name__)

# Read for every family.
SHARED = (
    "architectures dtype eos_token_id head_dim hidden_act hidden_activation hidden_size intermediate_size layer_types "
    "max_position_embeddings model_type num_attention_heads num_hidden_layers num_key_value_heads "
    "partial_rotary_factor quantization_config rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window "
    "tie_word_embeddings torch_dtype vocab_size classifier_from_token is_original_qwen3_reranker"
)
# Of training, of generation, of tokens, and of the form of answers. Biases are told by the tensors.
HARMLESS = (
    "activation_dropout attention_bias attention_dropout attn_implementation auto_map aux_loss_alpha bos_token_id "
    "cache_implementation chunk_size_feed_forward classifier_dropout dropout embd_pdrop ep_size id2label init_std "
    "initializer_range is_decoder is_encoder_decoder label2id layerdrop mlp_bias output_attentions "
    "output_hidden_states output_router_logits pad_token_id prefix pretraining_tp problem_type resid_pdrop "
    "return_dict router_aux_loss_coef router_jitter_noise sep_token_id seq_aux task_specific_params "
    "tokenizer_class transformers_version unk_token_id unsloth_fixed unsloth_version use_cache use_return_dict"
)
# Read for some families, by their architectures without the end.
OWN: Mapping[str, str] = {
    "DeepseekV2": "first_k_dense_replace kv_lora_rank moe_intermediate_size moe_layer_freq n_group n_routed_experts "
    "n_shared_experts norm_topk_prob num_experts_per_tok q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim "
    "rope_interleave routed_scaling_factor scoring_func topk_group topk_method v_head_dim",
    "DeepseekV3": "num_nextn_predict_layers num_mtp_layers",
    "Gemma2": "attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar sliding_window_pattern",
    "Gemma3": "rope_local_base_freq",
    "GptOss": "experts_per_token initial_context_length num_experts num_experts_per_tok num_local_experts swiglu_alpha "
    "swiglu_limit",
    "Granite": "attention_multiplier embedding_multiplier logits_scaling residual_multiplier",
    "MiniMaxM2": "num_experts_per_tok num_local_experts rotary_dim",
    "Mixtral": "num_experts_per_tok num_local_experts",
    "OPT": "activation_function do_layer_norm_before enable_bias ffn_dim layer_norm_elementwise_affine "
    "word_embed_proj_dim",
    "Phi3": "original_max_position_embeddings",
    "Qwen2": "max_window_layers use_sliding_window",
    "Qwen3Moe": "decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts "
    "num_experts_per_tok num_local_experts",
    "Qwen3Next": "decoder_sparse_step full_attention_interval linear_conv_kernel_dim linear_key_head_dim "
    "linear_num_key_heads linear_num_value_heads linear_value_head_dim mlp_only_layers moe_intermediate_size "
    "norm_topk_prob num_experts num_experts_per_tok shared_expert_intermediate_size",
    "SmolLM3": "no_rope_layer_interval no_rope_layers",
}
LIKE = {"DeepseekV3": "DeepseekV2", "Gemma3": "Gemma2", "Qwen3": "Qwen2", "Qwen3Moe": "Qwen2", "SmolLM3": "Qwen2"}
# Of a model with images, whose text is served.
IMAGES = "boi_token_index eoi_token_index image_token_index mm_tokens_per_image text_config vision_config"
# Change the mathematics, and are not implemented: the only value that is supported, for every family.
ONLY: Mapping[str, Any] = {
    "alibi": False, "attention_chunk_size": None, "attn_temperature_tuning": False, "clip_qkv": None,
    "dual_chunk_attention_config": None, "is_causal": True, "lm_head_bias": False, "use_bidirectional_attention": False,
}  # fmt: skip


def check(config: Config) -> None:
    """Raise InvalidValue for a key that changes the mathematics and is not implemented; log keys that are not known."""
    name = architecture(config)
    known = _known(name)
    texts = config.get("text_config") or {}
    unknown = []
    for key, value in {**texts, **config}.items():
        if key in ONLY and value is not None and value != ONLY[key]:
            raise InvalidValue(
                f"config.json: {key}={short(value)} is not supported; supported is {ONLY[key]!r}, as it changes the "
                "mathematics of the model",
                key,
            )
        if key not in known and key not in ONLY and not key.startswith("_") and value not in (None, False, [], {}):
            unknown.append(key)
    if unknown:
        log.warning("config.json: not read, as %s is not known to have them: %s", name, ", ".join(sorted(unknown)))


def _known(name: str) -> frozenset[str]:
    """Return the keys of an architecture that are read or change no logit."""
    images = IMAGES if name.endswith("ForConditionalGeneration") else ""
    family = name.removesuffix("ForConditionalGeneration").removesuffix("ForCausalLM")
    return frozenset(f"{SHARED} {HARMLESS} {images} {OWN.get(family, '')} {OWN.get(LIKE.get(family, ''), '')}".split())
