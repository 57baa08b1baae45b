"""Every key of a small config of each family, set to other values, and what becomes of it here and in transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxserve.models.registry import spec_from_config
from jaxserve.models.spec import ModelSpec
from jaxserve.sched.api.errors import InvalidValue
from tests.support.models.configs import (
    DEEPSEEK,
    DEEPSEEK3,
    GEMMA,
    GEMMA2,
    GLM,
    GPT_OSS,
    GRANITE,
    GROUPS,
    LLAMA3,
    MINIMAX,
    MIXTRAL,
    OLMO3,
    OPT,
    PHI3,
    QWEN3_MOE,
    QWEN3_NEXT,
    SMOLLM3,
    TOKENS,
    YARN,
)  # fmt: skip
from tests.support.models.driver import expected, fill, peer

SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
SMALL_ONES: dict[str, dict[str, Any]] = {
    "DeepseekV2": {**DEEPSEEK, **GROUPS, "q_lora_rank": 20},
    "DeepseekV3": DEEPSEEK3,
    "Gemma2": GEMMA2,
    "Gemma3": {**GEMMA, "num_hidden_layers": 7},
    "Glm": GLM,
    "Glm4": GLM,
    "GptOss": GPT_OSS,
    "Granite": GRANITE,
    "Llama": {},
    "MiniMaxM2": MINIMAX,
    "Mistral": {"sliding_window": 5},
    "Mixtral": MIXTRAL,
    "OPT": OPT,
    "Olmo2": {"pad_token_id": None},
    "Olmo3": OLMO3,
    "Phi3": PHI3,
    "Qwen2": SLIDING,
    "Qwen3": {"head_dim": 16, **SLIDING},
    "Qwen3Moe": {**QWEN3_MOE, **SLIDING},
    "Qwen3Next": QWEN3_NEXT,
    "SmolLM3": {**SMOLLM3, **SLIDING},
}
DERIVED = ("layer_types", "no_rope_layers", "mlp_layer_types", "head_dim")  # transformers computes them if absent
FEW = TOKENS[:16]
ROPES = [
    {"rope_type": "default", "rope_theta": 5e3},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    LLAMA3,
    YARN,
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
]
KINDS = ["full_attention", "sliding_attention"]
# Keys that modelling code reads, with other values, where a family's config class does not write them.
READ: dict[str, tuple[Any, ...]] = {
    "attention_chunk_size": (4,),
    "head_dim": (8, 32),
    "is_causal": (False,),
    "layer_types": (KINDS, KINDS[::-1], ["full_attention"], ["linear_attention", "full_attention"]),
    "no_rope_layers": ([0, 1], [1, 0], [1]),
    "sliding_window": (5,),
}


class Base(NamedTuple):
    """A small model of a family, with its config and logits."""

    model: Any
    config: dict[str, Any]
    logits: npt.NDArray[np.float32]
    spec: ModelSpec


@cache
def base(family: str) -> Base:
    changes = {name: value for name, value in SMALL_ONES[family].items() if name != "layer_types"}
    model: Any = peer(family, **changes)
    given = json.loads(model.config.to_json_string(use_diff=False))
    config = {name: value for name, value in given.items() if name not in DERIVED[:3]}
    config["architectures"] = [f"{family}ForCausalLM"]
    return Base(model, config, expected(model, FEW), spec_from_config(config))


def others(family: str, key: str) -> Iterator[Any]:
    """Yield other values of a key of the family's config."""
    config = base(family).config
    value, count = config.get(key), config["num_hidden_layers"]
    if key not in config:
        values = READ[key]
        yield from ((value * count)[:count] if isinstance(value, list) else value for value in values)
    elif key == "rope_parameters":
        nested = isinstance(value, dict) and "full_attention" in value
        yield from ({"full_attention": rope, "sliding_attention": rope} if nested else rope for rope in ROPES)
    elif key in ("hidden_act", "hidden_activation", "activation_function"):
        yield from ("gelu", "relu", "gelu_pytorch_tanh", "silu")
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value * 2, 0)
    elif isinstance(value, float):
        yield from (value * 1.5 + 0.1, 0.0)
    elif isinstance(value, list):
        yield value[:-1]
    elif value is None:
        yield from (True, 1, 4, 0.5, [1] * count, "other")
    else:
        yield f"{value}s"


class Changed(NamedTuple):
    """The base model with another value of a key."""

    model: Any
    logits: npt.NDArray[np.float32]
    differs: bool  # whether the weights or the logits are others


def changed(family: str, key: str, value: Any) -> Changed | None:
    """Return what transformers makes of another value; None if it refuses that."""
    model, config, logits, _ = base(family)
    try:
        other = type(model)(
            type(model.config).from_dict(deepcopy({**config, key: value}), attn_implementation="eager")
        ).eval()
        same = weights_of(other) == weights_of(model)
        if same:
            other.load_state_dict(model.state_dict())
        else:
            fill(other)
        got = expected(other, FEW)
    except Exception:  # of any kind: transformers does not check all values
        return None
    finite = bool(np.isfinite(got).all())
    return Changed(other, got, not same or not np.allclose(got, logits, atol=1e-6)) if finite else None


def weights_of(model: Any) -> dict[str, Any]:
    return {name: weight.shape for name, weight in model.named_parameters()}


def numbers(spec: ModelSpec) -> ModelSpec:
    """Return the spec without what changes no logit."""
    learned = spec.architecture.startswith("OPT")  # positions
    return replace(spec, eos=(), dtype="", guessing=0, max_positions=spec.max_positions if learned else 1)


def named(error: InvalidValue, key: str, value: Any) -> bool:
    """Return whether the error names the key, or one inside its value."""
    inner = value if isinstance(value, dict) else {}
    keys = [key, *inner, *(name for rope in inner.values() if isinstance(rope, dict) for name in rope)]
    kind = "a value of the wrong kind" in str(error)  # which transformers refuses too
    return kind or any(name in str(error) for name in keys)


def verdict(family: str, key: str, value: Any) -> tuple[str, Changed | None]:
    """Return what becomes of a value: refused, compared, ignored, or the fault; and what transformers makes of it."""
    theirs = changed(family, key, value)
    try:
        spec = spec_from_config({**base(family).config, key: value})
    except InvalidValue as error:
        size = theirs is None or value == 0  # a size that nothing can have
        return ("refused" if size or named(error, key, value) else f"refused without its name: {error}"), theirs
    if theirs is None:
        return "ignored", None
    if numbers(spec) != numbers(base(family).spec):
        return "compared", theirs
    return ("silently wrong" if theirs.differs else "ignored"), theirs


def trials(family: str) -> Iterator[tuple[str, Any]]:
    for key in dict.fromkeys([*base(family).config, *READ]):
        if key not in ("architectures", "model_type"):
            yield from ((key, value) for value in others(family, key))
