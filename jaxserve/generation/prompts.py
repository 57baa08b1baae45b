"""Prompts in the forms of vLLM's Python API: text, token ids, or a mapping with an optional cache salt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from jaxserve.errors import InvalidValue
from jaxserve.generation.sharing import check_salt
from jaxserve.generation.stops import Thinking

Prompt = str | Sequence[int] | Mapping[str, Any]

FORMS = "a string, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}, either with a 'cache_salt'"
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_SHOWN = 100  # characters of an invalid prompt that an error shows


class Parsed(NamedTuple):
    """A parsed prompt: `text` or `tokens` is None if it was not given.

    It shares pages of the prefix cache only with prompts of the same `cache_salt`. `thinking`: how the outputs of
    a conversation think.
    """

    text: str | None
    tokens: list[int] | None
    cache_salt: str | None = None
    thinking: Thinking | None = None


def parse_prompts(given: Any) -> list[Parsed]:
    """Parse a prompt or a sequence of prompts. Raises InvalidValue naming the value and what is allowed."""
    return [parse_prompt(prompt) for prompt in listed(given)]


def listed(given: Any) -> list[Any]:
    """Return a prompt or a sequence of prompts as a list. Raises InvalidValue for anything else."""
    if isinstance(given, str | Mapping):
        return [given]
    if not _is_sequence(given):
        raise InvalidValue(f"prompts={_shown(given)} must be {FORMS}, or a list of these", "prompts")
    one = len(given) > 0 and all(map(_is_token_id, given))  # a prompt of token ids
    return [given] if one else list(given)


def parse_prompt(given: Any) -> Parsed:
    """Parse a prompt. Raises InvalidValue naming the value and what is allowed."""
    if isinstance(given, str):
        return Parsed(given, None)
    if isinstance(given, Mapping):
        return _parse_mapping(given)
    if not _is_sequence(given):
        raise InvalidValue(f"prompt={_shown(given)} must be {FORMS}", "prompt")
    return Parsed(None, _token_ids(given))


def _parse_mapping(given: Mapping[str, Any]) -> Parsed:
    unknown = [key for key in given if key not in _KEYS and given[key] is not None]
    if unknown:
        raise InvalidValue(f"a prompt with {unknown[0]!r} is not supported: it must be {FORMS}", str(unknown[0]))
    text, tokens = given.get("prompt"), given.get("prompt_token_ids")
    if text is None and tokens is None:
        raise InvalidValue(f"a prompt with keys {sorted(map(str, given))} has no prompt: it must be {FORMS}", "prompt")
    if text is not None and not isinstance(text, str):
        raise InvalidValue(f"prompt={_shown(text)} must be a string; token ids belong in 'prompt_token_ids'", "prompt")
    if tokens is not None and not _is_sequence(tokens):
        raise InvalidValue(f"prompt_token_ids={_shown(tokens)} must be a list of token ids", "prompt_token_ids")
    salt = given.get("cache_salt")
    if salt is not None:
        check_salt(salt)
    return Parsed(text, None if tokens is None else _token_ids(tokens), salt)


def _token_ids(given: Any) -> list[int]:
    wrong = [token for token in given if not _is_token_id(token)]
    if wrong:
        raise InvalidValue(f"token id {_shown(wrong[0])} must be a whole number; a prompt is {FORMS}", "prompt")
    return [int(token) for token in given]


def _is_token_id(given: Any) -> bool:
    return isinstance(given, Integral) and not isinstance(given, bool)


def _is_sequence(given: Any) -> bool:
    """Return whether a value is a list, tuple or array; strings and bytes are not sequences here."""
    if isinstance(given, str | bytes | Mapping):
        return False
    return hasattr(given, "__len__") and hasattr(given, "__getitem__")


def _shown(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
