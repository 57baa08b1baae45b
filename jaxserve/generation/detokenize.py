"""Text from tokens one at a time, up to a stop string that may begin in one token and end in another."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple, Protocol

from jaxserve.generation.stops import Automaton, StopStrings
from jaxserve.sched.api.params import SamplingParams

_WINDOW = 16  # tokens decoded together at most: bounds the work per token
_CONTEXT = 4  # tokens kept to decode the next ones after; a character has at most 4 bytes
_BROKEN = "\ufffd"


class Decoder(Protocol):
    """What a Detokenizer needs of a tokenizer."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str: ...
    @property
    def byte_fallback(self) -> Set[int]: ...


class Detokenizer:
    """Turns a stream of tokens into a stream of text whose concatenation is the text of all tokens.

    A character spread over several tokens comes out whole; so does a run of byte-fallback tokens, which is UTF-8
    or garbage only as a whole. Amortised work per token is constant, also for endless garbage.
    """

    def __init__(self, tokenizer: Decoder, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []  # tokens decoded together: some that are out already, then the new ones
        self._shown = 0  # characters of the window's text that are out already
        self._run = False  # the window ends in byte-fallback tokens

    def add(self, token: int) -> str:
        """Text that has become certain with this token, maybe none."""
        self._window.append(token)
        self._run = token in self._tokenizer.byte_fallback
        return "" if self._run else self._emit(final=False)

    def flush(self) -> str:
        """The rest: called once, after the last token."""
        return self._emit(final=True)

    def _emit(self, *, final: bool) -> str:
        text = self._decode()
        end = len(text)
        if text.endswith(_BROKEN) and not final:
            if len(self._window) < _WINDOW:
                return ""  # the last character may be incomplete
            end -= 1  # only the last one can be: what is before it is garbage for good
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        if len(self._window) >= _WINDOW and not final:
            held = len(text) - end
            del self._window[:-_CONTEXT]
            self._shown = len(self._decode()) - held
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)


class Gain(NamedTuple):
    """What some tokens became: the text that may go out, how many of the tokens count, the stop string found."""

    text: str
    used: int
    stop: str | None = None


class TextStream:
    """Tokens of one output to text, up to its first stop string."""

    def __init__(self, tokenizer: Decoder, params: SamplingParams, stops: Automaton | None = None) -> None:
        """`stops` is the automaton of `params.stop`, where the outputs of a request share one."""
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStrings(params.stop if stops is None else stops, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._include = params.include_stop_str_in_output
        self._count = 0

    def add(self, tokens: Sequence[int], *, final: bool = False, stop_token: int | None = None) -> Gain:
        """Text that may go out after `tokens`. `final`: they are the last. `stop_token`: the last of them ended the
        output and is, like a stop string, part of its tokens but not of its text unless stop strings are included."""
        parts: list[str] = []
        silent = stop_token is not None and not self._include
        for used, token in enumerate(tokens, 1):
            self._count += 1
            if silent and used == len(tokens) and token == stop_token:
                break
            out, stop = self._push(self._detokenizer.add(token))
            parts.append(out)
            if stop is not None:
                return Gain("".join(parts), used, stop)
        if final:
            out, stop = self._push(self._detokenizer.flush())
            parts.append(out)
            if stop is None:
                parts.append(self._stops.flush())
            return Gain("".join(parts), len(tokens), stop)
        return Gain("".join(parts), len(tokens))

    def _push(self, text: str) -> tuple[str, str | None]:
        if self._count < self._min_tokens:
            return self._stops.flush() + text, None  # too early to stop: nothing is held back
        return self._stops.add(text)
