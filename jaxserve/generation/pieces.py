"""The text of each token where it stands, for lists of log-probabilities.

Decoders write a token by the one before it: the first word of a text has no space before it, WordPiece joins
what begins with `##`, and `</w>` becomes a space only if another token follows.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from jaxserve.generation.detokenize import end_of
from jaxserve.tokenizer import Tokenizer


class Pieces:
    """The bytes of the tokens of an output, and where they stand in its text. Writer: the answer that lists them."""

    def __init__(self, tokenizer: Tokenizer, skip: bool, before: Iterable[int] = (), offset: int = 0) -> None:
        """skip: special tokens have no text. before: the tokens before the first, last one first.

        offset: the characters before the first token.
        """
        self._tokenizer = tokenizer
        self._skip = skip
        self._after: int | None = None  # the last token with text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()  # of byte-fallback tokens
        self._start = self.offset = 0  # characters before the run, and before the next token
        self._broken = False  # a character of the prompt may be completed by the output
        for token in end_of(tokenizer, before, skip):
            self.add(token)
        self._broken = bool(self._decoder.getstate()[0])
        self._start, self.offset = offset - len(self._run), offset

    def raw(self, token: int) -> bytes:
        """Return the bytes of a token if it comes next; those of an omitted one are its name."""
        omitted = self._skip and token in self._tokenizer.special
        return self._tokenizer.piece_bytes(token, None if omitted else self._after)

    def text(self, token: int) -> str:
        """Return the text of a token if it comes next; parts of characters are U+FFFD."""
        return self.raw(token).decode("utf-8", "replace")

    def texts(self, tokens: Iterable[int]) -> list[str]:
        """Add tokens and return their texts."""
        return [(self.text(token), self.add(token))[0] for token in tokens]

    def add(self, token: int) -> int:
        """Add a token and return the characters before it; those that it completes begin before it."""
        at = self.offset
        if not self._tokenizer.has_text(token, self._skip):
            return at
        raw = self.raw(token)
        if token in self._tokenizer.byte_fallback:
            self._start = self._start if self._run else at
            self._run += raw
        elif self._run:
            at = self._end_run()
        pending, text = self._decoder.getstate()[0], self._decoder.decode(raw)
        if text and self._broken:  # what the prompt began became U+FFFD at its end, or it is complete now
            text, self._broken = text.removeprefix("\ufffd"), False
        elif pending and text.startswith("\ufffd"):  # that was no character
            at += 1
            text, self.offset = text[1:], at
        self.offset += len(text)
        self._after = token
        return at

    def _end_run(self) -> int:
        """Return the characters before the token after a run: if it is not UTF-8, each byte is one."""
        try:
            self._run.decode()
        except UnicodeDecodeError:
            self.offset = self._start + len(self._run)
        self._decoder.reset()
        self._run.clear()
        return self.offset
