"""The larger model of a comparison, saved in Hugging Face format."""

from __future__ import annotations

import shutil
from pathlib import Path

from common import DEMO

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def llama(folder: Path, **changes: int) -> Path:
    """Save a Llama of 185 M random parameters to `folder`, with the demo model's tokenizer.

    `changes` override fields of its config.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 2816,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
    }
    torch.manual_seed(0)
    config = LlamaConfig(
        **{**sizes, **changes}, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(DEMO / name, folder / name)
    return folder
