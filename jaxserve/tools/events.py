"""What a parser finds in the text of an output."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

Kind = Literal["content", "reasoning", "call", "arguments"]


class Event(NamedTuple):
    """An update: text of the answer or of the thinking, the name of a call that begins, or text of its arguments."""

    kind: Kind
    text: str


class Parser(Protocol):
    """Reads the text of one output as it arrives, however it is cut.

    Text that may become a marker is held back. The content is the text without calls, and without the
    whitespace next to them, but for a gap between two texts. A call is reported once its name and the brace
    of its arguments have been read; they follow as the model writes them, even if that is no JSON object in
    the end. Formats that are not JSON, and unusual orders of fields, are reported once they are complete.
    What is no call stays content, as it was written.
    """

    def feed(self, text: str) -> list[Event]:
        """Return what is certain after more text."""
        ...

    def finish(self) -> list[Event]:
        """Return what was held back; called once, after the last text."""
        ...


class Call(NamedTuple):
    """A complete call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str

    def events(self) -> list[Event]:
        return [Event("call", self.name), Event("arguments", self.arguments)]


class Markers(NamedTuple):
    """The texts around a call: `closing` is empty if the call lasts to the end of the output."""

    opening: str
    closing: str


Schemas = dict[str, dict[str, Any]]  # name of each tool -> JSON schema of its parameters
Maker = Callable[[Schemas], Parser]


def call_of(given: Any) -> Call | None:
    """Return the call in a JSON object with `name` and `arguments` (or `parameters`); None for anything else."""
    if not isinstance(given, dict) or not isinstance(given.get("name"), str) or not given["name"]:
        return None
    arguments = given.get("arguments", given.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = loaded(arguments)
    return Call(given["name"], written(arguments)) if isinstance(arguments, dict) else None


def written(arguments: dict[str, Any]) -> str:
    """Return arguments as JSON; it is ASCII only where a string holds half of a surrogate pair."""
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments)
    return text


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse)


def loaded(text: str) -> Any:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
