"""Write the demo model as a Hugging Face folder.

    python -m jaxserve.demo.export --work build/demo --out /tmp/demo

takes the last checkpoint of a training run, finished or not.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import safetensors.flax
from tokenizers import Tokenizer

from jaxserve.demo.corpus import ASSISTANT, END, END_OF_TEXT, USER
from jaxserve.demo.net import NetConfig

MODEL_FOLDER = Path(__file__).parent / "model"
DTYPE = "bfloat16"

# A system message has no token of its own: it opens the first question. Contents may be text parts.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}
{%- for part in content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set ns = namespace(opening='') -%}
{%- for message in messages -%}
{%- if message.role in ('system', 'developer') -%}
{%- set ns.opening = ns.opening + text(message.content) + '\\n' -%}
{%- elif message.role == 'user' -%}
{{- '<|user|>\\n' + ns.opening + text(message.content) + '<|end|>\\n' -}}
{%- set ns.opening = '' -%}
{%- elif message.role == 'assistant' -%}
{{- '<|assistant|>\\n' + text(message.content) + '<|end|>\\n' -}}
{%- else -%}
{{- raise_exception('this model knows the roles system, user and assistant, not ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""


def model_config(config: NetConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of `config.json`."""
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": end_of_text,
        "eos_token_id": [end_of_text, tokenizer.token_to_id(END)],
        "pad_token_id": end_of_text,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.dim,
        "initializer_range": 0.02,
        "intermediate_size": config.ff_dim,
        "max_position_embeddings": config.max_positions,
        "mlp_bias": False,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": DTYPE,
        "use_cache": True,
        "vocab_size": config.vocab,
    }


def tokenizer_config(config: NetConfig) -> dict[str, Any]:
    """The content of `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [USER, ASSISTANT, END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_positions,
    }


def generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of `generation_config.json`: either end token ends a completion."""
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    return {
        "bos_token_id": end_of_text,
        "eos_token_id": [end_of_text, tokenizer.token_to_id(END)],
        "pad_token_id": end_of_text,
    }


def hf_weights(params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Rename and transpose to Hugging Face's names and [out, in] layout, in bfloat16."""
    weights = {}
    for name, value in params.items():
        owner, _, leaf = name.rpartition(".")
        turned = value.T if leaf == "kernel" else value
        weights[f"model.{owner}.weight"] = jnp.asarray(turned, jnp.bfloat16)
    return weights


def _write(path: Path, data: bytes) -> None:
    """Replace the file in one step: a server may be reading the folder."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    os.replace(partial, path)


def write_model(folder: Path, config: NetConfig, tokenizer: Tokenizer, params: Mapping[str, jax.Array]) -> int:
    """Write the whole folder; return its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = {
        "config.json": model_config(config, tokenizer),
        "tokenizer_config.json": tokenizer_config(config),
        "generation_config.json": generation_config(tokenizer),
    }
    for name, content in documents.items():
        _write(folder / name, (json.dumps(content, indent=2) + "\n").encode())
    _write(folder / "chat_template.jinja", CHAT_TEMPLATE.encode())
    _write(folder / "tokenizer.json", tokenizer.to_str(pretty=False).encode())
    weights = safetensors.flax.save(hf_weights(params), metadata={"format": "pt"})
    _write(folder / "model.safetensors", weights)
    return sum(path.stat().st_size for path in folder.iterdir())


def main(arguments: Sequence[str] | None = None) -> None:
    """Export the last checkpoint of a training run."""
    from jaxserve.demo.train import TOKENIZER_FILE, Checkpoints  # it imports this file

    parser = argparse.ArgumentParser(prog="python -m jaxserve.demo.export", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="working folder of the run")
    parser.add_argument("--out", type=Path, default=MODEL_FOLDER, help="folder to write (default: the package's)")
    options = parser.parse_args(arguments)
    state = Checkpoints(options.work).restore()
    tokenizer = Tokenizer.from_file(str(options.work / TOKENIZER_FILE))
    size = write_model(options.out, NetConfig(), tokenizer, state.params)
    print(f"step {state.step}: {size / 1e6:.2f} MB in {options.out}")


if __name__ == "__main__":
    main()
