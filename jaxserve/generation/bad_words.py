"""`bad_words` as the token ids that the engine needs."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.sched.api.params import SamplingParams
from jaxserve.tokenizer import Tokenizer


def with_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return parameters with the token ids of their `bad_words`.

    As in vLLM, a word is banned at the beginning of a text, and after a space where that is another token.
    """
    if params.bad_words_token_ids:
        return params
    banned = list[tuple[int, ...]]()
    for word in params.bad_words:
        plain, spaced = (tuple(tokenizer.encode(f"{space}{word.lstrip()}", False)) for space in ("", " "))
        banned += [plain] if plain else []
        if spaced and (not plain or (spaced[0] != plain[0] and len(spaced) == len(plain))):
            banned.append(spaced)
    return replace(params, bad_words_token_ids=tuple(dict.fromkeys(banned)))
