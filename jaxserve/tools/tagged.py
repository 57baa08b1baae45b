"""MiniMax-M2, Qwen3-Coder and GLM-4.5: calls as tags with a tag per parameter, whose text has the schema's type."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from jaxserve.tools.events import Call, Event, Markers, Parser, Schemas, loaded, written
from jaxserve.tools.json_calls import HERMES as QWEN
from jaxserve.tools.marked import Content, Marked
from jaxserve.tools.scan import Automaton, Cursor, Finder
from jaxserve.tools.streamed import HEAD

MINIMAX = Markers("<minimax:tool_call>", "</minimax:tool_call>")


class Tag(NamedTuple):
    """How an element is written: `opening`, its name, `>`, its content and `closing`."""

    opening: str
    closing: str


INVOKE, NAMED = Tag("<invoke name=", "</invoke>"), Tag("<parameter name=", "</parameter>")
FUNCTION, EQUAL = Tag("<function=", "</function>"), Tag("<parameter=", "</parameter>")
KEY, VALUE = Tag("<arg_key>", "</arg_key>"), Tag("<arg_value>", "</arg_value>")
BARE, CLOSING = Automaton([*QWEN, *FUNCTION, *EQUAL]), Automaton([QWEN.closing])


def minimax_m2(schemas: Schemas) -> Parser:
    return Marked(MINIMAX, partial(_read, schemas, INVOKE, NAMED), json=False)


def glm45(schemas: Schemas) -> Parser:
    """Return a parser of one output, with tags around each key and each value."""
    return Marked(QWEN, partial(_read_pairs, schemas), json=False)


class Coder:
    """Finds Qwen3-Coder's calls, which may come without the markers around them (a `Parser`).

    Without markers a call is `<function=NAME>`, the name of a tool, and a parameter or the end. Writer: one parser.
    """

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._content = Content()
        self._finder = Finder(BARE)
        self._block: list[str] = []  # its text so far
        self._state = self._outside  # reads the text before the next mark, and the mark
        self._inside = False  # in a parameter of a call without markers
        self._bare = False  # such a call has just ended

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        at = 0
        while at < len(text):
            before, mark, at = self._finder.read(text, at)
            events += self._state(before, mark)
        return events

    def finish(self) -> list[Event]:
        events = self._state(self._finder.rest(), "")
        return events + (self._end() if self._block else []) + self._content.finish()

    def _outside(self, before: str, mark: str) -> list[Event]:
        events = self._content.add(before)
        self._bare = self._bare and not events
        if mark == QWEN.opening:
            self._block, self._state, self._finder = [mark], self._tagged, Finder(CLOSING)
        elif mark == FUNCTION.opening:
            self._block, self._state = [mark], self._head
        elif mark == QWEN.closing and self._bare:
            self._bare = False
        elif mark:
            events += self._content.add(mark)
        return events

    def _tagged(self, before: str, mark: str) -> list[Event]:
        self._block += (before, mark)
        return self._end() if mark else []

    def _head(self, before: str, mark: str) -> list[Event]:
        """Read the beginning of a call without markers; what is none must not wait for the end of the output."""
        self._block.append(before)
        text = "".join(self._block)
        if not mark and len(text) <= HEAD:
            return []
        head = Cursor(text)
        name = _opened(head, FUNCTION)
        head.skip()
        if name in self._schemas and head.done and mark in (EQUAL.opening, FUNCTION.closing):
            self._state, self._inside = self._body, False
            return self._body("", mark)
        return self._leave(mark)

    def _body(self, before: str, mark: str) -> list[Event]:
        self._block.append(before)
        if mark in (QWEN.opening, QWEN.closing, FUNCTION.opening) and not self._inside:
            return self._leave(mark)
        self._block.append(mark)
        if mark == FUNCTION.closing and not self._inside:
            events = self._end()
            self._bare = bool(events)
            return events
        self._inside = mark == EQUAL.opening or (self._inside and mark != EQUAL.closing)
        return []

    def _leave(self, mark: str) -> list[Event]:
        """Pass on the block, which is no call, and read the mark after it."""
        text, self._block, self._state = "".join(self._block), [], self._outside
        return self._content.add(text) + self._outside("", mark)

    def _end(self) -> list[Event]:
        """Return the calls of the block, or its text if there are none."""
        text = "".join(self._block)
        body = text.removeprefix(QWEN.opening).removesuffix(QWEN.closing)
        calls = _read(self._schemas, FUNCTION, EQUAL, Cursor(body))
        self._block, self._state, self._finder = [], self._outside, Finder(BARE)
        if calls:
            return self._content.calls([event for call in calls for event in call.events()])
        return self._content.add(text)


def _read(schemas: Schemas, function: Tag, parameter: Tag, body: Cursor) -> list[Call] | None:
    """Return the calls of a block; None if anything but whitespace stands beside calls or parameters."""
    calls = []
    body.skip()
    while name := _opened(body, function):
        known = schemas.get(name, {}).get("properties", {})
        arguments = dict[str, Any]()
        body.skip()
        while key := _opened(body, parameter):
            text, closed = body.until(parameter.closing)
            if not closed:
                return None
            arguments[key] = value_of(text, known.get(key))
            body.skip()
        if not body.take(function.closing):
            return None
        calls.append(Call(name, written(arguments)))
        body.skip()
    return calls if calls and body.done else None


def _read_pairs(schemas: Schemas, body: Cursor) -> list[Call] | None:
    body.skip()
    name, arguments = body.word(), dict[str, Any]()
    known = schemas.get(name, {}).get("properties", {})
    body.skip()
    while body.take(KEY.opening):
        key, closed = body.until(KEY.closing)
        body.skip()
        if not (closed and body.take(VALUE.opening)):
            return None
        value, closed = body.until(VALUE.closing)
        if not closed:
            return None
        arguments[key.strip()] = value_of(value, known.get(key.strip()))
        body.skip()
    return [Call(name, written(arguments))] if name and body.done else None


def _opened(body: Cursor, tag: Tag) -> str:
    """Skip the beginning of an element and return its name; "" if there is none."""
    if not body.take(tag.opening):
        return ""
    name, closed = body.until(">")
    return name.removeprefix('"').removesuffix('"').strip() if closed else ""


def value_of(text: str, schema: Any) -> Any:
    """Return the value of a parameter that was written as text: a string if the schema asks for one, else JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    value = loaded(text.strip())
    allowed = _types(schema)
    if "string" in allowed and not (value is None and "null" in allowed and text.strip() == "null"):
        others = allowed - {"string", "null"}
        return value if others and value is not None and not isinstance(value, str) else text
    return text if value is None and text.strip() != "null" else value


def _types(schema: Any) -> set[str]:
    """Return the types that a schema names, in alternatives and values too, as pydantic writes `str | None`."""
    if not isinstance(schema, dict):
        return set()
    types = set[str]()
    alternatives = (schema.get(key) for key in ("anyOf", "oneOf", "allOf"))
    for alternative in [schema, *(option for given in alternatives if isinstance(given, list) for option in given)]:
        kinds = alternative.get("type") if isinstance(alternative, dict) else None
        types.update(kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
    return types | {"string" for value in values if isinstance(value, str)}
