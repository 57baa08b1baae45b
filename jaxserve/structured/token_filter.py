"""Tokens that a request may sample whatever its text looks like: vLLM's `allowed_token_ids` and `bad_words`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxserve.sched.api.params import SamplingParams

Words = npt.NDArray[np.int32]  # bit t % 32 of word t // 32: token t is allowed


def words(vocab: int) -> int:
    """Return the number of words of a mask."""
    return -(-vocab // 32)


def all_allowed(rows: int, vocab: int) -> Words:
    """Return masks [rows, W] that allow every token."""
    return np.full((rows, words(vocab)), -1, np.int32)


class TokenFilter:
    """The tokens that may follow an output. Immutable."""

    def __init__(self, vocab: int, allowed: Sequence[int] | None, banned: Sequence[Sequence[int]]) -> None:
        """allowed: ids that may be sampled, None: all. banned: sequences whose last token may not follow the others."""
        if allowed is None:
            self._always = np.full(words(vocab), -1, np.int32)
        else:
            bits = np.zeros(32 * words(vocab), np.uint8)
            bits[np.asarray(allowed)] = 1
            self._always = np.packbits(bits, bitorder="little").view(np.int32)
        self._after: dict[tuple[int, ...], list[int]] = defaultdict(list)  # by the tokens before
        for *before, last in banned:
            if before:
                self._after[tuple(before)].append(last)
            else:
                self._always[last // 32] &= ~bit(last)
        self._lengths = sorted({len(before) for before in self._after})
        self.reach = max(self._lengths, default=0)  # tokens of the output that matter

    @classmethod
    def of(cls, params: SamplingParams, vocab: int) -> TokenFilter | None:
        """Return the filter of a request, or None if every token may be sampled."""
        if params.allowed_token_ids is None and not params.bad_words_token_ids:
            return None
        return cls(vocab, params.allowed_token_ids, params.bad_words_token_ids)

    def apply(self, mask: Words, tail: tuple[int, ...]) -> bool:
        """Remove tokens from a mask [W]; return whether one is left. tail: at least the last `reach` tokens."""
        mask &= self._always
        for length in self._lengths:
            for token in self._after.get(tail[-length:], ()):
                mask[token // 32] &= ~bit(token)
        return bool(mask.any())


def bit(token: int) -> np.int32:
    """Return the bit of a token in its word."""
    return np.uint32(1 << (token % 32)).view(np.int32)
