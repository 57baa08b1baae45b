"""Write the demo model as a Hugging Face folder.

    python -m jaxserve.demo.export --work build/demo --out /tmp/demo

exports the last checkpoint of a training run, finished or not.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from tokenizers import Tokenizer

from jaxserve.demo.corpus import ASSISTANT, END, END_OF_TEXT, USER
from jaxserve.demo.vocab import TOKENIZER_FILE
from jaxserve.training.folder import llama_config, size, write, write_json, write_weights
from jaxserve.training.net import NetConfig

MODEL_FOLDER = Path(__file__).parent / "model"

# A system message has no special token; it is put before the first question. Contents may be text parts.
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


def special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the special token ids of the configs. Both end tokens end a completion."""
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    return {
        "bos_token_id": end_of_text,
        "eos_token_id": [end_of_text, tokenizer.token_to_id(END)],
        "pad_token_id": end_of_text,
    }


def tokenizer_config(config: NetConfig) -> dict[str, Any]:
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


def write_model(folder: Path, config: NetConfig, tokenizer: Tokenizer, params: Mapping[str, jax.Array]) -> int:
    """Write the model folder and return its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    special = special_ids(tokenizer)
    documents = {
        "config.json": llama_config(config, special),
        "tokenizer_config.json": tokenizer_config(config),
        "generation_config.json": special,
    }
    for name, content in documents.items():
        write_json(folder / name, content)
    write(folder / "chat_template.jinja", CHAT_TEMPLATE.encode())
    write(folder / "tokenizer.json", tokenizer.to_str(pretty=False).encode())
    write_weights(folder, params)
    return size(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Export the last checkpoint of a training run."""
    from jaxserve.training.checkpoints import Checkpoints  # imported late: it needs orbax

    parser = argparse.ArgumentParser(prog="python -m jaxserve.demo.export", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="work folder of the training run")
    parser.add_argument("--out", type=Path, default=MODEL_FOLDER, help="folder to write (default: the package's)")
    options = parser.parse_args(arguments)
    state = Checkpoints(options.work).restore()
    tokenizer = Tokenizer.from_file(str(options.work / TOKENIZER_FILE))
    written = write_model(options.out, NetConfig(), tokenizer, state.params)
    print(f"step {state.step}: {written / 1e6:.2f} MB in {options.out}")


if __name__ == "__main__":
    main()
