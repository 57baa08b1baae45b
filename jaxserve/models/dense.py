"""Dense families: each is a row of a table that says how it differs from Llama.

A row gives the values that transformers assumes for keys that a config.json leaves out, what `spec.common` may
allow, and a function for the other fields of the spec. `names` reads renamed and fused tensors of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxserve.models.context_length import Config
from jaxserve.models.layers import Decoder
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import Experts, ModelSpec, Norms, Windows, architecture, common, need
from jaxserve.sched.api.errors import InvalidValue

__all__ = ["Decoder", "qwen3", "read"]

AFTER = Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm")
GEMMA = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
GLM = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
KINDS = ("full_attention", "sliding_attention")
NULLED = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")  # null is not absent: there is none


def _biased(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bool(config.get("mlp_bias", False))}


def _glm(config: Config) -> dict[str, Any]:
    return {"qkv_bias": bool(config["attention_bias"])}


def _granite(config: Config) -> dict[str, Any]:
    return _biased(config) | {
        "embed_scale": float(config.get("embedding_multiplier", 1.0)),
        "query_scale": float(config.get("attention_multiplier", 1.0)),
        "residual_scale": float(config.get("residual_multiplier", 1.0)),
        "logit_divisor": float(config.get("logits_scaling", 1.0)),
    }


def _gemma(config: Config) -> dict[str, Any]:
    return _biased(config) | {
        "embed_scale": float(need(config, "hidden_size")) ** 0.5,
        "query_scale": float(config["query_pre_attn_scalar"]) ** -0.5,
        "logit_softcap": float(config.get("final_logit_softcapping") or 0.0),
        "norms": GEMMA,
        "norm_offset": 1.0,
    }


def _gemma2(config: Config) -> dict[str, Any]:
    return _gemma(config) | {"softcap": float(config.get("attn_logit_softcapping") or 0.0)}


def _smollm3(config: Config) -> dict[str, Any]:
    return _biased(config) | {"unrotated": tuple(not turns for turns in _rotated(config))}


def _rotated(config: Config) -> list[bool]:
    """Return for each layer of SmolLM3 whether it has RoPE."""
    given = config.get("no_rope_layers")
    if given is None:
        return _one_in(config, "no_rope_layer_interval")
    return [bool(flag) for flag in given][: int(need(config, "num_hidden_layers"))]


def _named(slides: list[bool]) -> list[str]:
    return [KINDS[slide] for slide in slides]


def _every(config: Config) -> list[str]:
    """Return the kinds of layers if one in so many has no window."""
    return _named(_one_in(config, "sliding_window_pattern"))


def _one_in(config: Config, key: str) -> list[bool]:
    """Return True for each layer, but False for one in `config[key]` layers."""
    every = int(config[key])
    if every < 1:
        raise InvalidValue(f"config.json: {key}={every} must be at least 1", key)
    return [(i + 1) % every != 0 for i in range(int(need(config, "num_hidden_layers")))]


def _unrotated_slide(config: Config) -> list[str]:
    slides = bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None
    return _named([slides and not turns for turns in _rotated(config)])


class Family(NamedTuple):
    """How a family differs from Llama."""

    facts: Callable[[Config], dict[str, Any]] = _biased  # fields of the spec besides those of `common`
    defaults: Mapping[str, Any] = MappingProxyType({})  # values of absent keys, where they are not those of `common`
    activation: str = "silu"
    windows: Windows = ""
    partials: bool = False
    interleaved: bool = False  # whether checkpoints rotate pairs (2 i, 2 i + 1)
    kinds: Callable[[Config], list[str]] | None = None  # of layers, in configs without `layer_types`
    local: str = ""  # key of the theta of sliding layers, in configs without RoPE by kind of layer


_GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True, "sliding_window": 4096}
_GEMMA2 = {
    **_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2,
    "max_position_embeddings": 8192,
}  # fmt: skip
_GEMMA3 = {
    **_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6,
    "max_position_embeddings": 131_072,
}  # fmt: skip
# Published configs of the larger models leave out what their text has in common.
_GEMMA3_SIZES = {
    **_GEMMA3, "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
_GLM = {
    "head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7, "attention_bias": True,
    "partial_rotary_factor": 0.5, "max_position_embeddings": 131_072,
}  # fmt: skip
_OLMO = {"rms_norm_eps": 1e-5}

FAMILIES: Mapping[str, Family] = {
    "Gemma2ForCausalLM": Family(_gemma2, _GEMMA2, "gelu_pytorch_tanh", windows="some", kinds=_every),
    "Gemma3ForCausalLM": Family(
        lambda config: _gemma(config) | {"qk_norm": "head"},
        _GEMMA3, "gelu_pytorch_tanh", windows="some", kinds=_every, local="rope_local_base_freq",
    ),
    "GlmForCausalLM": Family(_glm, _GLM, partials=True, interleaved=True),
    "Glm4ForCausalLM": Family(
        lambda config: _glm(config) | {"norms": GLM}, _GLM, partials=True, interleaved=True
    ),
    "GraniteForCausalLM": Family(_granite),
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(
        defaults={"sliding_window": 4096, "max_position_embeddings": 131_072}, windows="all"
    ),
    "Olmo2ForCausalLM": Family(lambda config: _biased(config) | {"norms": AFTER, "qk_norm": "all"}, _OLMO),
    "Olmo3ForCausalLM": Family(
        lambda config: _biased(config) | {"norms": AFTER, "qk_norm": "all"},
        {**_OLMO, "rope_theta": 5e5, "sliding_window": 4096, "sliding_window_pattern": 4},
        windows="some", kinds=_every, local="rope_theta",
    ),
    "Phi3ForCausalLM": Family(
        lambda config: {}, {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}, windows="all", partials=True
    ),
    "Qwen2ForCausalLM": Family(lambda config: {"qkv_bias": True}, {"max_position_embeddings": 32_768}, windows="some"),
    "Qwen3ForCausalLM": Family(
        lambda config: _biased(config) | {"qk_norm": "head", "mlp_bias": False},
        {"head_dim": 128, "max_position_embeddings": 32_768},
        windows="some",
    ),
    "SmolLM3ForCausalLM": Family(
        _smollm3,
        {
            "rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4,
            "max_position_embeddings": 32_768,
        },
        windows="some", kinds=_unrotated_slide,
    ),
}  # fmt: skip
# Models with images, of which the text is served: the family of their `text_config`.
TEXTS = {"Gemma3ForConditionalGeneration": FAMILIES["Gemma3ForCausalLM"]._replace(defaults=_GEMMA3_SIZES)}


def read(config: Config) -> ModelSpec:
    name = architecture(config)
    text = name in TEXTS
    return dense({**need(config, "text_config"), **config} if text else config, TEXTS[name] if text else FAMILIES[name])


def dense(config: Config, family: Family, **facts: Any) -> ModelSpec:
    """Return the spec of a config of a dense family; `facts` override."""
    config = {**family.defaults} | {key: value for key, value in config.items() if value is not None or key in NULLED}
    if family.kinds is not None and not config.get("layer_types"):
        config["layer_types"] = family.kinds(config)
    wide, local = _ropes(config, family.local) if family.local else (config, None)
    shared = common(wide, activations=(family.activation,), windows=family.windows, partials=family.partials)
    shared["rope"] = rope = replace(shared["rope"], interleaved=family.interleaved)
    slid = None if local is None else read_rope(local)[0]
    return ModelSpec(**{**shared, "local_rope": None if slid == rope else slid, **family.facts(config), **facts})


def qwen3(config: Config, moe: Experts) -> ModelSpec:
    """Return the spec of a Qwen 3 with experts."""
    return dense(config, FAMILIES["Qwen3ForCausalLM"]._replace(windows="all"), moe=moe)


def _ropes(config: Config, local: str) -> tuple[Config, Config]:
    """Return the configs that `read_rope` reads for layers without and with a window, from both formats."""
    given = config.get("rope_parameters") or {}
    wide, slid = given.get("full_attention") or {}, given.get("sliding_attention") or {}
    if not wide:
        wide = {**(config.get("rope_scaling") or {}), **{key: given[key] for key in given if key not in KINDS}}
    plain = {**config, "rope_scaling": None}
    return (
        {**plain, "rope_parameters": {"rope_theta": config["rope_theta"], **wide}},
        {**plain, "rope_parameters": {"rope_theta": config[local], **slid}},
    )
