"""The registry of model families, and the pure functions that the engine calls.

To add a family, see docs/reference/add-a-model.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models import manifest
from jaxserve.models.context_length import Config
from jaxserve.models.delta_net import rows_of
from jaxserve.models.hub import other_format
from jaxserve.models.json_file import object_in
from jaxserve.models.keys import check
from jaxserve.models.layers import SHARDED, Decoder, Info, Part, Stream, Tree, is_info, tree_of
from jaxserve.models.names import lacks_head
from jaxserve.models.narrow import narrowed
from jaxserve.models.packed.methods import completed
from jaxserve.models.quantized import Quantized, multiplied_by
from jaxserve.models.spec import ModelSpec, architecture, check_sizes, ids_of
from jaxserve.models.transposed import Transposed
from jaxserve.sched.api.errors import InvalidValue, short
from pallas_kernels.attention.api import Attention, Pool
from pallas_kernels.layout import Ragged

WRONG = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)  # raised by values of the wrong kind
DENSE = "jaxserve.models.dense"
CLASSIFIER = "ForSequenceClassification"  # the end of architectures with a score head: see `score_head`
FAMILIES = {
    "DeepseekV2ForCausalLM": "jaxserve.models.deepseek",
    "DeepseekV3ForCausalLM": "jaxserve.models.deepseek",
    "Gemma2ForCausalLM": DENSE,
    "Gemma3ForCausalLM": DENSE,
    "Gemma3ForConditionalGeneration": DENSE,
    "Glm4ForCausalLM": DENSE,
    "GlmForCausalLM": DENSE,
    "GptOssForCausalLM": "jaxserve.models.gpt_oss",
    "GraniteForCausalLM": DENSE,
    "LlamaForCausalLM": DENSE,
    "MiniMaxM2ForCausalLM": "jaxserve.models.minimax_m2",
    "MistralForCausalLM": DENSE,
    "MixtralForCausalLM": "jaxserve.models.mixtral",
    "OPTForCausalLM": "jaxserve.models.opt",
    "Olmo2ForCausalLM": DENSE,
    "Olmo3ForCausalLM": DENSE,
    "Phi3ForCausalLM": DENSE,
    "Qwen2ForCausalLM": DENSE,
    "Qwen3ForCausalLM": DENSE,
    "Qwen3MoeForCausalLM": "jaxserve.models.qwen3_moe",
    "Qwen3NextForCausalLM": "jaxserve.models.qwen3_next",
    "SmolLM3ForCausalLM": DENSE,
}


def _family(name: str) -> Any:
    if name not in FAMILIES:
        raise InvalidValue(f"architecture {short(name)} is not supported; supported: {', '.join(FAMILIES)}", "model")
    return import_module(FAMILIES[name])


def load_spec(path: Path) -> ModelSpec:
    """Return the spec of the model in folder `path`.

    Reads config.json, the EOS ids of generation_config.json and of the tokenizer, and the quantization of a
    converted model. Raises InvalidValue.
    """
    spec = spec_from_config(read_config(path))
    more: Sequence[int] = ()
    if (path / "generation_config.json").is_file():
        more = ids_of(object_in(path / "generation_config.json").get("eos_token_id"))
    every = dict.fromkeys([*spec.eos, *more, *_tokenizers_eos(path)])
    spec = replace(spec, eos=tuple(id for id in every if 0 <= id < spec.vocab))  # a tokenizer may have more entries
    converted = manifest.find(path)
    if converted is not None:
        spec = replace(spec, quantized=converted.quantized)
    if not spec.tied and (lacks_head(path) if converted is None else "head" not in converted.parts):
        return spec.headless()
    return spec


def _tokenizers_eos(path: Path) -> list[int]:
    """Return the id of the tokenizer's `eos_token`: fine-tunes for chat often name another one than the base model."""
    if not (path / "tokenizer_config.json").is_file():
        return []
    given = object_in(path / "tokenizer_config.json")
    token = given.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    try:
        added = given.get("added_tokens_decoder") or {}
        known = [int(id) for id, one in added.items() if isinstance(one, dict) and one.get("content") == text]
        if known or text is None or not (path / "tokenizer.json").is_file():
            return known
        from tokenizers import Tokenizer  # reading a large vocabulary takes a while, and is seldom needed

        id = Tokenizer.from_file(str(path / "tokenizer.json")).token_to_id(text)
    except Exception as error:  # tokenizers raises nothing more special
        raise InvalidValue(f"the tokenizer in {str(path)!r} cannot be read: {str(error)[:300]}", "tokenizer") from error
    return [] if id is None else [id]


def read_config(path: Path) -> Config:
    """Read config.json of the model in folder `path`. Raises InvalidValue if it is missing or invalid."""
    return completed(_read_json(path, "config.json"), path)


def spec_from_config(config: Config) -> ModelSpec:
    """Return the spec of a Hugging Face config. Raises InvalidValue for unsupported values."""
    try:
        for part in (config, config.get("text_config") or {}):
            check_sizes(part)
        name = architecture(config)
        whole = name.removesuffix("Model").removesuffix(CLASSIFIER) + "ForCausalLM"
        bare = name not in FAMILIES and whole in FAMILIES  # a decoder that gives vectors
        config = {**config, "architectures": [whole]} if bare else config
        check(config)
        read: ModelSpec = _family(architecture(config)).read(config)
        spec = read.headless() if bare else read
    except InvalidValue:
        raise
    except WRONG as error:
        raise InvalidValue(f"config.json has a value of the wrong kind: {str(error)[:300]}", "model") from error
    return spec


def _read_json(path: Path, name: str) -> dict[str, Any]:
    what = "a folder of a Hugging Face model: config.json, *.safetensors and the tokenizer's files"
    if not path.is_dir():
        raise InvalidValue(f"model folder {str(path)!r} does not exist; expected {what}", "model")
    if not (path / name).is_file():
        raise InvalidValue(f"{str(path / name)!r} is missing; {other_format(path) or f'expected {what}'}", "model")
    return object_in(path / name)


@lru_cache(maxsize=32)
def decoder(spec: ModelSpec) -> Decoder:
    """Return the module tree of a spec, with descriptions for parameters."""
    module: Decoder = _family(spec.architecture).Decoder(spec)
    return module


def abstract_weights(spec: ModelSpec, dtype: Any) -> Tree:
    """Return the weight tree with an `Info` for each weight: {"embed", "layers": [...], "norm", "head" unless tied}.

    Quantized weights have a `Quantized` of two `Info`s, transposed ones a `Transposed` of one.
    """

    def typed(info: Info) -> Info | Quantized | Transposed:
        param = narrowed(replace(info, dtype=jnp.dtype(dtype)) if info.dtype is None else info, spec.quantized)
        if spec.transposed and isinstance(param, Info) and param.contract == 0:
            shared = [at for at, axis in enumerate(param.axes[1:]) if axis in SHARDED]
            return Transposed(param.inputs_last(), 0 if spec.whole or not shared else shared[0])
        if spec.whole and isinstance(param, Quantized) and param.axis == 0 and param.per_channel:
            values = param.values.inputs_last()
            return Quantized(values, param.scale.inputs_last(), len(values.shape) - 1)
        return param

    return jax.tree.map(typed, tree_of(decoder(spec)), is_leaf=is_info)


def begin(spec: ModelSpec, weights: Tree, tokens: jax.Array, ragged: Ragged, *, attention: Attention) -> Stream:
    """Return the input of the first layer for tokens [T] int32. Needs no weights of layers."""
    model = decoder(spec)
    with jax.named_scope("embed"):
        x = model.embedded(weights, tokens, ragged.positions)
    turns = model.turns(ragged.positions)
    with jax.named_scope("plan"):
        work = attention.plan(ragged)
    rows = None if spec.delta is None else rows_of(ragged, decode=attention.decode)
    return Stream(x, turns, work, rows)


def through(
    spec: ModelSpec,
    kinds: Sequence[int],
    layers: Sequence[Tree],
    pools: Sequence[Pool],
    stream: Stream,
    *,
    attention: Attention,
    part: Part = Part.WHOLE,
) -> tuple[jax.Array, list[Pool]]:
    """Apply consecutive layers of the given kinds, or a part of each, and return x [T, E] and their pools."""
    model, filled = decoder(spec), []
    # Jitted, so that layers of a kind are traced once: kernels that are traced per layer are compiled per layer.
    layer = {kind: jax.jit(partial(model.layer, kind, part, kernel=attention)) for kind in set(kinds)}
    for kind, leaves, pool in zip(kinds, multiplied_by(list(layers), attention.products), pools, strict=True):
        x, pool = layer[kind](leaves, pool, stream)
        stream = stream._replace(x=x)
        filled.append(pool)
    return stream.x, filled


def finish(spec: ModelSpec, weights: Tree, x: jax.Array) -> jax.Array:
    """Apply the final norm to the output of the last layer, [T, E]. Needs no weights of layers."""
    return decoder(spec).finish(weights, x)


def forward(
    spec: ModelSpec, weights: Tree, pools: list[Pool], tokens: jax.Array, ragged: Ragged, *, attention: Attention
) -> tuple[jax.Array, list[Pool]]:
    """Compute hidden [T, E] after the final norm for tokens [T] int32, and the updated pools.

    pools: for each layer the arrays that `spec.cache` describes.
    attention: `dispatch.attention(mesh, choice, decode=...)`.
    """
    stream = begin(spec, weights, tokens, ragged, attention=attention)
    x, filled = through(spec, spec.kinds, weights["layers"], pools, stream, attention=attention)
    return finish(spec, weights, x), filled


def logits(spec: ModelSpec, weights: Tree, hidden: jax.Array) -> jax.Array:
    """Compute logits [S, V] float32 from hidden [S, E]."""
    with jax.named_scope("logits"):
        return decoder(spec).logits(weights, hidden)
