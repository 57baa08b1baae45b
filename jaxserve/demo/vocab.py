"""The demo model's tokenizer: byte-level BPE with 4096 tokens, which decodes any text to itself."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxserve.demo.corpus import END_OF_TEXT, SPECIAL_TOKENS

TOKENIZER_FILE = "tokenizer.json"


def train_tokenizer(documents: Iterable[str], size: int = 4096) -> Tokenizer:
    """Train a tokenizer of `size` tokens: special tokens (ids 0 to 3), then the 256 bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, but {size=} is required")
    return tokenizer


def pack(tokenizer: Tokenizer, documents: Iterable[str]) -> np.ndarray:
    """Encode all documents into one array [tokens] uint16, with an end-of-text token before each and at the end."""
    end_of_text = SPECIAL_TOKENS.index(END_OF_TEXT)  # special tokens have the first ids
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(documents), add_special_tokens=False):
        ids.append(end_of_text)
        ids.extend(encoding.ids)
    ids.append(end_of_text)
    return np.asarray(ids, np.uint16)
