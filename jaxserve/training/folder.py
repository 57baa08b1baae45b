"""Write a trained net as a Hugging Face folder, replacing each file atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import safetensors.flax

from jaxserve.training.net import NetConfig

DTYPE = "bfloat16"


def llama_config(config: NetConfig, special: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `config.json`. `special`: the tokenizer's bos_token_id, eos_token_id and pad_token_id."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        **special,
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


def hf_weights(params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the weights in bfloat16 with Hugging Face's names and [out, in] layout."""
    weights = {}
    for name, value in params.items():
        owner, _, leaf = name.rpartition(".")
        turned = value.T if leaf == "kernel" else value
        weights[f"model.{owner}.weight"] = jnp.asarray(turned, jnp.bfloat16)
    return weights


def write(path: Path, data: bytes) -> None:
    """Write a file atomically, because a server may be reading the folder."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    os.replace(partial, path)


def write_json(path: Path, content: Any, indent: int = 2) -> None:
    write(path, (json.dumps(content, indent=indent) + "\n").encode())


def write_weights(folder: Path, params: Mapping[str, jax.Array]) -> None:
    write(folder / "model.safetensors", safetensors.flax.save(hf_weights(params), metadata={"format": "pt"}))


def size(folder: Path) -> int:
    """Return the bytes of the files in a folder, excluding subfolders."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
