"""What an output must look like: plain data, validated on construction but for what only a compiler can tell."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from .errors import InvalidValue, short

MAX_SIZE = 1 << 20  # bytes of a schema, an expression or a grammar
MAX_CHOICE_SIZE = 1 << 18  # bytes of all choices together
MAX_WHITESPACE = 256  # characters of a whitespace pattern
MAX_CHOICES = 10_000
# Fits expressions that match nothing but the whitespace of JSON.
BLANKS_ONLY = re.compile(r"(?:[ \t\r\n]|\\[nrt]|[\[\]()|?*+]|\{\d{1,4}(?:,\d{0,4})?\})+")
JSON_KINDS = ("json", "json_object", "structural_tag")
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """A constraint on the text of an output, with the names of vLLM's `StructuredOutputsParams`.

    Exactly one of these is set: `json`, a JSON schema (text, a mapping, or a pydantic model); `regex`;
    `choice`, a list of texts; `grammar`, in the Lark syntax of llguidance or in GBNF; `json_object`, any
    JSON object; `structural_tag`, as in vLLM (text or a mapping), for JSON in between free text.

    `disable_any_whitespace`: JSON has no whitespace outside of strings. `whitespace_pattern`: the expression for
    the whitespace in each place where JSON may have some. `lenient`: keywords of a schema that cannot be
    enforced are ignored instead of refused, and `oneOf` counts as `anyOf`. Raises InvalidValue with the field,
    the value and what is allowed.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    lenient: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "json", _json_text("json", _schema(self.json)))
        object.__setattr__(self, "structural_tag", _json_text("structural_tag", self.structural_tag))
        object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise InvalidValue(f"{name}={short(value)} must be a text that is not empty", name)
        for name in ("json_object", "disable_any_whitespace", "lenient"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidValue(f"{name}={short(getattr(self, name))} must be true or false", name)
        given = [name for name in KINDS if getattr(self, name)]
        if len(given) != 1:
            told = f"{' and '.join(given)} are given" if given else "none is given"
            raise InvalidValue(
                f"structured outputs need exactly one of {', '.join(KINDS)}; {told}", "structured_outputs"
            )
        self._check_whitespace()
        most = MAX_CHOICE_SIZE if self.choice else MAX_SIZE
        if (size := self.size) > most:
            raise InvalidValue(f"{self.kind} has {size} bytes: at most {most} are allowed", self.kind)

    def _check_whitespace(self) -> None:
        name, pattern = "whitespace_pattern", self.whitespace_pattern
        if pattern is None:
            return
        allowed = "an expression of blanks, \\n, \\r, \\t and [ ] ( ) | ? * + {m,n}"
        if isinstance(pattern, str) and len(pattern) > MAX_WHITESPACE:
            raise InvalidValue(f"{name} has {len(pattern)} characters: at most {MAX_WHITESPACE} are allowed", name)
        if not isinstance(pattern, str) or not BLANKS_ONLY.fullmatch(pattern):
            raise InvalidValue(f"{name}={short(pattern)} must be {allowed}", name)
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise InvalidValue(f"{name}={short(pattern)} is not {allowed}: {error}", name) from error
        if self.kind not in JSON_KINDS:
            allowed = ", ".join(JSON_KINDS)
            raise InvalidValue(f"{name}={short(pattern)} is of no use for {self.kind}: allowed with {allowed}", name)
        if self.disable_any_whitespace:
            raise InvalidValue(f"{name}={short(pattern)} and disable_any_whitespace are given: leave one out", name)

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(name for name in KINDS if getattr(self, name))

    @property
    def size(self) -> int:
        """The number of bytes to compile."""
        given = getattr(self, self.kind)
        return sum(len(text.encode(errors="replace")) for text in ((given,) if isinstance(given, str) else self.choice))

    @classmethod
    def of(cls, given: Any) -> StructuredOutputs:
        """Convert a mapping of the fields. Raises InvalidValue for an unknown field."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, dict):
            raise InvalidValue(
                f"structured_outputs={short(given)} must be an object with one of {', '.join(KINDS)}",
                "structured_outputs",
            )
        known = {field.name for field in fields(cls)}
        if unknown := sorted(map(str, set(given) - known)):
            raise InvalidValue(
                f"structured_outputs.{unknown[0][:100]} is unknown: allowed are {', '.join(sorted(known))}",
                f"structured_outputs.{unknown[0][:100]}",
            )
        try:
            return cls(**{name: value for name, value in given.items() if value is not None})
        except InvalidValue as error:
            param = error.param
            raise InvalidValue(str(error), f"structured_outputs.{param}" if param in known else param) from error


def _schema(given: Any) -> Any:
    """Return the JSON schema of a pydantic model; anything else as it is."""
    method = getattr(given, "model_json_schema", None)
    return method() if callable(method) else given


def _json_text(name: str, given: Any) -> str | None:
    """Return JSON as text. A text is checked where it is compiled: reading a long one takes as long as a step."""
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, dict):
        raise InvalidValue(f"{name}={short(given)} must be an object, or its text", name)
    try:
        return json.dumps(given)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValue(f"{name} cannot be written as JSON: {str(error)[:200]}", name) from error


def _choices(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    allowed = f"a list of 1 to {MAX_CHOICES} texts that are not empty"
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InvalidValue(f"choice={short(given)} must be {allowed}", "choice")
    choices = tuple(given)
    if len(choices) > MAX_CHOICES or not all(isinstance(text, str) and text for text in choices):
        raise InvalidValue(f"choice={short(list(choices))} must be {allowed}", "choice")
    return choices
