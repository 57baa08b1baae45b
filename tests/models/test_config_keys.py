"""Every key of a config.json is implemented, does not matter, or is refused by name.

Each key that transformers writes for a family is set to other values. Where transformers' logits change, ours must
be the same, or the config must be refused with the key in the message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from jaxserve.models import dense
from jaxserve.models.registry import FAMILIES, spec_from_config
from jaxserve.models.spec import ModelSpec
from jaxserve.sched.api.errors import InvalidValue
from tests.support.examples import cases
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
from tests.support.models.driver import SMALL, Driver, expected, fill, peer

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
BARE = ("Gemma3", "Phi3", "SmolLM3")
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
    config, value = base(family).config, base(family).config[key]
    count = config["num_hidden_layers"]
    if key == "rope_parameters":
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


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Models are small: more threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
    for key in base(family).config:
        if key not in ("architectures", "model_type"):
            yield from ((key, value) for value in others(family, key))


@pytest.mark.parametrize("family", cases(BARE, SMALL_ONES))
def test_no_key_changes_the_mathematics_in_silence(family: str) -> None:
    found = {(key, str(value)): verdict(family, key, value)[0] for key, value in trials(family)}
    assert {trial: what for trial, what in found.items() if what not in ("refused", "compared", "ignored")} == {}
    assert set(found.values()) == {"refused", "compared", "ignored"}


@pytest.mark.parametrize("family", cases([], SMALL_ONES))
def test_every_value_that_is_read_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    """One value of each key, and every kind of RoPE."""
    wrong: dict[tuple[str, str], float] = {}
    tried = set[str]()
    for at, (key, value) in enumerate(trials(family)):
        what, theirs = verdict(family, key, value) if key not in tried else ("", None)
        if what == "compared" and theirs is not None:
            tried |= {key} - {"rope_parameters"}
            folder = tmp_path / str(at)
            theirs.model.save_pretrained(folder)
            config = json.dumps({**base(family).config, key: value})
            (folder / "config.json").write_text(config)
            off = float(np.abs(Driver.of(folder).feed(FEW) - theirs.logits).max())
            if off > 2e-4:
                wrong[key, str(value)] = off
    assert wrong == {}


@pytest.mark.parametrize("family", SMALL_ONES)
def test_every_key_that_transformers_writes_is_known(family: str, caplog: pytest.LogCaptureFixture) -> None:
    config = base(family).config
    caplog.clear()
    spec_from_config(config)
    assert caplog.messages == []
    spec_from_config({**config, "novel_scaling": 2.0, "other": None})
    assert caplog.messages == [
        f"config.json: not read, as {family}ForCausalLM is not known to have them: novel_scaling"
    ]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen2", {"dual_chunk_attention_config": {"chunk_size": 262144}}),
        ("Gemma3", {"use_bidirectional_attention": True}),
        ("Qwen2", {"is_causal": False}),
    ],
)
def test_keys_that_change_the_mathematics_are_refused(family: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match=f"{next(iter(changes))}=.* is not supported; supported is"):
        spec_from_config({**base(family).config, **changes})


@pytest.mark.parametrize("family", [name.removesuffix("ForCausalLM") for name in (*dense.FAMILIES, "Mixtral")])
def test_absent_keys_mean_what_transformers_fills_in(family: str) -> None:
    names = {"architectures": [f"{family}ForCausalLM"]}
    sizes = {name: SMALL[name] for name in SMALL if not name.startswith(("max", "tie"))} | {"pad_token_id": None}
    filled = type(base(family).model.config)(**sizes).to_dict()
    specs = [replace(spec_from_config({**config, **names}), eos=()) for config in (sizes, filled)]
    assert replace(specs[0], dtype=specs[1].dtype) == specs[1]


def test_every_family_is_tried() -> None:
    assert {name for name in FAMILIES if name.endswith("ForCausalLM")} == {f"{name}ForCausalLM" for name in SMALL_ONES}
