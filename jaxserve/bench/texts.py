"""Prompts as text, for servers that do not accept token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxserve.bench.load import Call
from jaxserve.tokenizer import Tokenizer

# Common words, one token each in most vocabularies. /tokenize of this text yields ids of a server's vocabulary.
SAMPLE = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know"
)
ROUNDS = 8  # attempts to bring a text to its length


class WordWriter:
    """Writes a common word for each id: about the right length for most models, without a tokenizer."""

    def __init__(self) -> None:
        self._words = SAMPLE.split()

    @property
    def vocabulary(self) -> Sequence[int]:
        """The known ids."""
        return range(len(self._words))

    def write(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Return the text of some ids; its length in tokens is 0, as only the server knows it."""
        return " ".join(self._words[token] for token in tokens), 0


class TokenizerWriter:
    """Writes text that a model's tokenizer encodes to the requested length."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = sorted(set(tokenizer.encode(SAMPLE, add_special_tokens=False)))

    @classmethod
    def load(cls, name: str) -> TokenizerWriter:
        """Load by Hugging Face name or folder. Raises InvalidValue."""
        return cls(Tokenizer.load(name))

    @property
    def vocabulary(self) -> Sequence[int]:
        return self._ids

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, without special tokens."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def write(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Convert ids to a text that encodes to as many tokens, if possible.

        Neighboring ids may encode to fewer tokens, so the text is cut or extended until its length
        fits.
        """
        wanted, given = len(tokens), list(tokens)
        for turn in range(ROUNDS):
            text = self._tokenizer.decode(given)
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
            if len(encoded) == wanted:
                break
            missing = wanted - len(encoded)
            given = encoded[:wanted] + [tokens[(turn + at) % wanted] for at in range(missing)]
        return text, len(encoded)


Writer = WordWriter | TokenizerWriter


def as_text(calls: Sequence[Call], writer: Writer) -> list[Call]:
    """Return the calls with text instead of token ids."""
    texts = []
    for call in calls:
        if not isinstance(call.prompt, str):
            text, count = writer.write(call.prompt)
            call = replace(call, prompt=text, prompt_tokens=count)
        texts.append(call)
    return texts
