"""Incremental detokenization, up to a stop string that may span tokens.

The text of an output is what the tokenizer decodes for prompt and output together, less the prompt:
decoders treat the first token in their own way (that of Llama 2 strips its space), and an output may
complete a character that the prompt began.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxserve.generation.stops import StopStrings, Thinking, Thoughts
from jaxserve.sched.api.params import SamplingParams
from jaxserve.tokenizer import Tokenizer, common
from jaxserve.tools.scan import Automaton

_WINDOW = 16  # most tokens decoded together: bounds the work per token
_CONTEXT = 4  # tokens kept as context for the next ones; a character has at most 4 bytes
_BROKEN = "\ufffd"


def end_of(tokenizer: Tokenizer, before: Iterable[int], skip: bool) -> list[int]:
    """Return the last tokens that have text, with all of a byte-fallback run at their end. before: last one first."""
    end: list[int] = []
    for token in before:
        if not tokenizer.has_text(token, skip):
            continue  # bytes before and after it are one run
        run = end and end[-1] in tokenizer.byte_fallback and token in tokenizer.byte_fallback
        if len(end) >= _CONTEXT and not run:
            break
        end.append(token)
    return end[::-1]


class Detokenizer:
    """Converts the tokens of an output into a stream of text that concatenates to its whole text.

    A character that spans several tokens is emitted whole, and so is a run of byte-fallback tokens,
    which is valid UTF-8 only as a whole. The amortized work per token is constant, also for endless
    invalid bytes.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> None:
        """prompt: the tokens before the output; only its last ones are read."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # Tokens decoded together: some as context, then the new ones.
        self._window = end_of(tokenizer, reversed(prompt), skip_special_tokens)
        self._prompt = tuple(self._window)  # until text is emitted
        self._shown = 0  # characters of the window's text that were emitted, or belong to the prompt

    def add(self, tokens: Sequence[int], *, final: bool = False) -> str:
        """Add tokens and return the text that is now certain, possibly none. final: these are the last tokens."""
        # As context, tokens without text would push out those that have some.
        added = [token for token in tokens if self._tokenizer.has_text(token, self._skip)]
        self._window += added
        if not final and (not added or added[-1] in self._tokenizer.byte_fallback):
            return ""
        text = self._tokenizer.decode(self._window, self._skip)
        end = len(text)
        if text.endswith(_BROKEN) and not final:
            if len(self._window) < _WINDOW:
                return ""  # the last character may be incomplete
            end -= 1  # only the last character can be incomplete; earlier ones are invalid for good
        if self._prompt:  # its text and not just its length: the output may have completed its last character
            self._shown, self._prompt = common(self._tokenizer.decode(self._prompt, self._skip), text), ()
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        if len(self._window) >= _WINDOW and not final:
            del self._window[:-_CONTEXT]
            self._shown = len(self._tokenizer.decode(self._window, self._skip)) - (len(text) - end)
        return new


class Gain(NamedTuple):
    """The result of adding tokens: text to emit, number of tokens used, stop string found."""

    text: str
    used: int
    stop: str | None = None
    thought: int = 0  # how many of the tokens so far are thinking


class TextStream:
    """Converts the tokens of one output to text, up to the first stop string of its answer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        stops: Automaton | None = None,
        prompt: Sequence[int] = (),
        thinking: Thinking | None = None,
    ) -> None:
        """stops: the automaton of `params.stop`, if the outputs of a request share one.

        thinking: how the output thinks, which stop strings do not end; None: all of its text is the answer.
        """
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, prompt)
        self._stops: StopStrings | None = None
        if params.stop:
            self._stops = StopStrings(params.stop if stops is None else stops, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._include = params.include_stop_str_in_output
        self._count = 0
        self._thoughts = None if thinking is None else Thoughts(thinking)
        self._thought = 0

    def add(self, tokens: Sequence[int], *, final: bool = False, stop_token: int | None = None) -> Gain:
        """Add tokens and return the text that may be emitted.

        final: these are the last tokens. stop_token: the last token if it ended the output; like a stop
        string, it is part of the tokens, but of the text only if stop strings are included.
        """
        shown = tokens
        if stop_token is not None and not self._include and tokens and tokens[-1] == stop_token:
            shown = tokens[:-1]
        if self._stops is None and self._thoughts is None:  # nothing asks which token a text came with
            return Gain(self._detokenizer.add(shown, final=final), len(tokens))
        parts: list[str] = []
        for used, token in enumerate(shown, 1):
            self._count += 1
            out, stop = self._push(self._detokenizer.add((token,)))
            parts.append(out)
            if stop is not None:
                return Gain("".join(parts), used, stop, self._thought)
        self._count += len(tokens) - len(shown)
        if final:
            out, stop = self._push(self._detokenizer.add((), final=True))
            parts.append(out)
            if stop is None and self._thoughts is not None:
                out, stop = self._stop(self._thoughts.flush())
                parts.append(out)
            if stop is None and self._stops is not None:
                parts.append(self._stops.flush())
            return Gain("".join(parts), len(tokens), stop, self._thought)
        return Gain("".join(parts), len(tokens), None, self._thought)

    def _push(self, text: str) -> tuple[str, str | None]:
        if self._thoughts is None or self._thoughts.state == "answer":
            return self._stop(text)
        thinking, text = self._thoughts.add(text)
        if self._thoughts.state == "thinking" or thinking:
            self._thought = self._count
        out, stop = self._stop(text)
        return thinking + out, stop

    def _stop(self, text: str) -> tuple[str, str | None]:
        if self._stops is None:
            return text, None
        if self._count < self._min_tokens:
            return self._stops.flush() + text, None  # too early to stop: hold nothing back
        return self._stops.add(text)
