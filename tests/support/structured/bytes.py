"""A tokenizer of single bytes, for models with a vocabulary of 256."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np

from jaxserve.structured.constraint import Constraint
from jaxserve.structured.token_filter import words
from jaxserve.tokenizer import _byte_alphabet

END = 7  # the id that ends a text; the byte 7 cannot be written


@cache
def tokenizer_json() -> str:
    """Return the text of a tokenizer.json in which token i is the byte i, but END ends the text."""
    written = {byte: char for char, byte in _byte_alphabet().items()}
    vocab = {written[byte]: byte for byte in range(256) if byte != END} | {"</s>": END}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return json.dumps(
        {
            "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
            "added_tokens": [{"id": END, "content": "</s>", **special}],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": [],
            },
        }
    )  # fmt: skip


def bits(mask: Any) -> set[int]:
    """Return the tokens of a mask."""
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def allowed(constraint: Constraint) -> set[int]:
    """Return the tokens that a constraint allows next."""
    mask = np.zeros(words(256), np.int32)
    constraint.fill(mask)
    return bits(mask)
