"""Sampling and stopping parameters of a request: plain data, validated on construction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from .errors import InvalidValue, short

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOPS, MAX_STOP_LENGTH = 64, 1024  # OpenAI allows 4; each is searched for at every token
MAX_STOP_TOKENS = 1024
_WHOLE = ("n", "min_tokens", "top_k")
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
_REAL = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping parameters, with vLLM's names and defaults.

    `temperature` 0 is greedy. `top_k` 0 or -1 and `top_p` 1 are off. If `seed` is None, each
    request gets a random one. `max_tokens` None allows the whole context length. `logprobs` and
    `prompt_logprobs` are numbers of alternatives.

    As in vLLM, `stop` may be a string or a list, `stop_token_ids` a list and `logit_bias` a
    mapping, and each may be None. They are stored as tuples. Raises InvalidValue with the field,
    the value and what is allowed.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases("logit_bias", self.logit_bias))
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
            ("repetition_penalty", self.repetition_penalty > 0.0, "above 0"),
            ("stop", all(self.stop), "strings that are not empty"),
            (
                "stop",
                len(self.stop) <= MAX_STOPS and all(len(one) <= MAX_STOP_LENGTH for one in self.stop),
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
        ):
            if not ok:
                raise InvalidValue(f"{name}={short(getattr(self, name))} must be {allowed}", name)

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
    made = _listed(name, given, "a string or a list of strings")
    if not all(isinstance(one, str) for one in made):
        raise InvalidValue(f"{name}={given!r} must be a string or a list of strings", name)
    return made


def _token_ids(name: str, given: Any) -> tuple[int, ...]:
    made = _listed(name, given, "a list of token ids")
    if not all(isinstance(one, Integral) and not isinstance(one, bool) for one in made):
        raise InvalidValue(f"{name}={given!r} must be a list of token ids", name)
    return tuple(map(int, made))


def _biases(name: str, given: Any) -> tuple[tuple[int, float], ...]:
    allowed = "a mapping of token ids to numbers"
    pairs = _listed(name, given.items() if isinstance(given, Mapping) else given, allowed)
    try:
        return tuple((int(token), float(bias)) for token, bias in pairs)
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"{name}={given!r} must be {allowed}", name) from error


def _listed(name: str, given: Any, allowed: str) -> tuple[Any, ...]:
    if given is None:
        return ()
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InvalidValue(f"{name}={given!r} must be {allowed}", name)
    return tuple(given)
