"""Write a Hugging Face Llama as a float32 GGUF file for llama.cpp.

The module is not called `gguf`: worker.py runs with this folder at the front of sys.path, where vLLM and transformers
would import it instead of the package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with numpy, which safetensors looks up by name
import numpy as np

from jaxserve.install import needs


def rope_pairs_adjacent(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a q or k projection, [heads * head_dim, hidden], for llama.cpp's RoPE.

    Hugging Face rotates rows i and i + head_dim / 2 of a head together, llama.cpp rows 2i and 2i + 1.
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and float32 values of every tensor of a folder's safetensors files."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name).astype(np.float32)


def rope_theta(config: Mapping[str, Any]) -> float:
    """Return RoPE's base. Raises ValueError for scaled RoPE, which this writer does not express."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type {kind!r} cannot be written as GGUF here; it must be 'default'")
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))


def write_sizes(writer: Any, config: Mapping[str, Any]) -> None:
    """Write the metadata of the architecture."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def write_vocabulary(writer: Any, config: Mapping[str, Any]) -> None:
    """Write a vocabulary in which the text of a token is a space and its id.

    Prompts are token ids, so the text is only what the server streams. With the model's own tokens the server would
    withhold the chunk of a token that ends inside a UTF-8 character, which would delay its first token.
    """
    size = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"Ġ{number}" for number in range(size)])  # "Ġ" is a space in byte-level BPE
    writer.add_token_types([1] * size)  # normal tokens
    writer.add_token_merges(["Ġ 1"])  # the loader demands at least one
    end = config.get("eos_token_id") or 0
    # Without an end token llama.cpp would take id 11.
    writer.add_eos_token_id(end[0] if isinstance(end, list) else end)
    writer.add_add_bos_token(False)


def write(folder: Path, path: Path) -> Path:
    """Write the Llama in `folder` to `path`. Raises ValueError for a model that it cannot express."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError(f"the gguf package is missing: {needs('bench')}") from error
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise ValueError(f"model_type {config['model_type']!r} cannot be written as GGUF here; it must be 'llama'")
    heads = config["num_attention_heads"]
    rotated = {"q_proj": heads, "k_proj": config.get("num_key_value_heads") or heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    write_sizes(writer, config)
    write_vocabulary(writer, config)
    for name, values in tensors(folder):
        stem, _, suffix = name.rpartition(".")
        known = names.get_name(stem)
        if known is None or suffix != "weight":  # a bias of q and k would need the permutation too
            raise ValueError(f"tensor {name!r} is not a weight of a Llama")
        projection = stem.rpartition(".")[2]
        if projection in rotated:
            values = rope_pairs_adjacent(values, rotated[projection])
        writer.add_tensor(f"{known}.{suffix}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
