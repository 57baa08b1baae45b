"""Sampling and stopping parameters of a request: plain data, validated on construction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from .errors import InvalidValue, short
from .pooling import MEAN, POOLINGS
from .structured_outputs import StructuredOutputs

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOPS, MAX_STOP_LENGTH = 64, 1024  # OpenAI allows 4; each is searched for at every token
MAX_STOP_TOKENS = 1024
MAX_BAD_WORDS, MAX_WORD_LENGTH = 1024, 256
MOST_ARGUMENT = 3.4028234e38  # float32
PLAIN_ARGUMENT = 1.0  # of a logits processor that is asked for by name alone
_WHOLE = ("n", "min_tokens", "top_k")
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
_REAL = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping parameters, with vLLM's names and defaults.

    `temperature` 0 is greedy. `top_k` 0 or -1 and `top_p` 1 are off. If `seed` is None, each
    request gets a random one. `max_tokens` None allows the whole context length. `logprobs` and
    `prompt_logprobs` are numbers of alternatives.

    As in vLLM, `stop` may be a string or a list, `stop_token_ids` a list and `logit_bias` a
    mapping, and each may be None. They are stored as tuples. `structured_outputs` may be a mapping
    of its fields. `allowed_token_ids` None allows all. The engine needs `bad_words_token_ids`, which `LLM` and the
    server set from `bad_words`. `truncate_prompt_tokens` keeps the last tokens of a prompt; -1: as many as fit.
    `pooling`, "last" or "mean", asks for one vector of the prompt's hidden states instead of text; it needs `n`
    and `max_tokens` of 1, and the sampled token is not part of the output. `logits_processors` is a list of names,
    or of mappings with `name` and `argument`, a number (1 if it is left out); they are stored as pairs, and the
    server applies them in its own order. Raises InvalidValue with the field, the
    value and what is allowed.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    truncate_prompt_tokens: int | None = None
    pooling: str | None = None
    logits_processors: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases("logit_bias", self.logit_bias))
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputs.of(self.structured_outputs))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        object.__setattr__(self, "bad_words", _strings("bad_words", self.bad_words))
        words = _listed("bad_words_token_ids", self.bad_words_token_ids, "a list of lists of token ids")
        object.__setattr__(
            self, "bad_words_token_ids", tuple(_token_ids("bad_words_token_ids", word) for word in words)
        )
        object.__setattr__(self, "logits_processors", _processors("logits_processors", self.logits_processors))
        self._to_plain_numbers()
        for name, ok, allowed in (
            ("n", self.n >= 1, "at least 1"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= (self.max_tokens or self.min_tokens), "0 to max_tokens"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "0 (greedy) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= -1, "0 or -1 (off), or at least 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100.0, "between 0.01 and 100"),
            ("stop", all(self.stop), "strings that are not empty"),
            (
                "stop",
                len(self.stop) <= MAX_STOPS and all(len(stop) <= MAX_STOP_LENGTH for stop in self.stop),
                f"at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH} characters each; "
                f"there are {len(self.stop)}, the longest of {max(map(len, self.stop), default=0)}",
            ),
            (
                "stop_token_ids",
                len(self.stop_token_ids) <= MAX_STOP_TOKENS,
                f"at most {MAX_STOP_TOKENS} token ids; there are {len(self.stop_token_ids)}",
            ),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
                f"0 to {MAX_LOGPROBS}",
            ),
            ("logit_bias", len(self.logit_bias) <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS} entries"),
            ("allowed_token_ids", self.allowed_token_ids != (), "None (all), or at least one token id"),
            ("bad_words", all(map(str.strip, self.bad_words)), "texts that are not empty"),
            (
                "bad_words",
                len(self.bad_words) <= MAX_BAD_WORDS and all(len(word) <= MAX_WORD_LENGTH for word in self.bad_words),
                f"at most {MAX_BAD_WORDS} texts of at most {MAX_WORD_LENGTH} characters each",
            ),
            ("bad_words_token_ids", all(self.bad_words_token_ids), "lists of at least one token id"),
            (
                "truncate_prompt_tokens",
                self.truncate_prompt_tokens in (None, -1) or (self.truncate_prompt_tokens or 0) >= 1,
                "-1 (as many as fit), or at least 1",
            ),
            ("pooling", self.pooling is None or self.pooling in POOLINGS, f"None or one of {', '.join(POOLINGS)}"),
            ("n", self.pooling is None or self.n == 1, "1 with pooling"),
            ("max_tokens", self.pooling is None or self.max_tokens == 1, "1 with pooling"),
        ):
            if not ok:
                raise InvalidValue(f"{name}={short(getattr(self, name))} must be {allowed}", name)

    def of_output(self, seed: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """Return those of one of several outputs, without checking again what is checked."""
        own = copy(self)
        for name, value in (("n", 1), ("seed", seed), ("prompt_logprobs", prompt_logprobs)):
            object.__setattr__(own, name, value)
        return own

    def _to_plain_numbers(self) -> None:
        """Convert numbers of other libraries to Python's, which JSON can hold.

        Raises InvalidValue for other types, which would otherwise fail later without naming the
        field.
        """
        for name in (*_WHOLE, *_REAL, *_OPTIONAL):
            value, whole = getattr(self, name), name not in _REAL
            kind: Any = Integral if whole else Real
            if isinstance(value, bool) or not isinstance(value, kind):
                if value is None and name in _OPTIONAL:
                    continue
                optional = " or None" * (name in _OPTIONAL)
                raise InvalidValue(f"{name}={value!r} must be a {'whole ' * whole}number{optional}", name)
            object.__setattr__(self, name, int(value) if whole else float(value))

    @property
    def constrained(self) -> bool:
        """Whether masks say which tokens may be sampled."""
        return (
            self.structured_outputs is not None or self.allowed_token_ids is not None or bool(self.bad_words_token_ids)
        )

    def room(self, context: int) -> int | None:
        """Return the number of tokens that a prompt keeps in a context of `context` tokens; None: all."""
        if self.truncate_prompt_tokens != -1:
            return self.truncate_prompt_tokens
        return max(1, context - (self.max_tokens or 1))

    @property
    def whole_prompt(self) -> bool:
        """Whether every position of the prompt must be computed, even if its KV is in a prefix cache."""
        return self.prompt_logprobs is not None or self.pooling == MEAN

    def drafts(self, generated: int) -> bool:
        """Return whether the tokens after the first `generated` may be drafted.

        Penalties depend on each token before, and log-probabilities, biases and bans need one token
        at a time.
        """
        return (
            generated >= self.min_tokens
            and self.repetition_penalty == 1.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and self.logprobs is None
            and not self.logit_bias
        )


def _strings(name: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)  # a string is iterable, but it is one stop string
    strings = _listed(name, given, "a string or a list of strings")
    if not all(isinstance(string, str) for string in strings):
        raise InvalidValue(f"{name}={given!r} must be a string or a list of strings", name)
    return strings


def _token_ids(name: str, given: Any) -> tuple[int, ...]:
    ids = _listed(name, given, "a list of token ids")
    if set(map(type, ids)) <= {int}:  # as always but from other libraries; there may be a whole vocabulary of them
        return ids
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in ids):
        raise InvalidValue(f"{name}={given!r} must be a list of token ids", name)
    return tuple(map(int, ids))


def _biases(name: str, given: Any) -> tuple[tuple[int, float], ...]:
    allowed = "a mapping of token ids to numbers"
    pairs = _listed(name, given.items() if isinstance(given, Mapping) else given, allowed)
    try:
        return tuple((int(token), float(bias)) for token, bias in pairs)
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"{name}={given!r} must be {allowed}", name) from error


def _processors(name: str, given: Any) -> tuple[tuple[str, float], ...]:
    allowed = 'a list of names, or of objects with "name" and "argument" (a number that float32 holds), each name once'
    processors = tuple(map(_processor, _listed(name, given, allowed)))
    if None in processors or len({processor for processor, _ in filter(None, processors)}) < len(processors):
        raise InvalidValue(f"{name}={short(given)} must be {allowed}", name)
    return tuple(filter(None, processors))


def _processor(given: Any) -> tuple[str, float] | None:
    """Return a logits processor's name and argument, or None if that is not what `given` is."""
    name: Any
    argument: Any
    number: Any = Real
    if isinstance(given, str):
        name, argument = given, PLAIN_ARGUMENT
    elif isinstance(given, Mapping) and "name" in given and given.keys() <= {"name", "argument"}:
        name, argument = given["name"], given.get("argument", PLAIN_ARGUMENT)
    elif isinstance(given, tuple | list) and len(given) == 2:  # as they are stored
        name, argument = given
    else:
        return None
    if not isinstance(name, str) or isinstance(argument, bool) or not isinstance(argument, number):
        return None
    return (name, float(argument)) if name and abs(argument) <= MOST_ARGUMENT else None  # false for NaN


def _listed(name: str, given: Any, allowed: str) -> tuple[Any, ...]:
    if given is None:
        return ()
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InvalidValue(f"{name}={given!r} must be {allowed}", name)
    return tuple(given)
