"""Mistral: `[TOOL_CALLS]` with a JSON list of calls, or a name, `[ARGS]` and arguments (from tokenizer v11 on)."""

from __future__ import annotations

from jaxserve.tools.events import Call, Markers, Parser, Schemas, call_of, written
from jaxserve.tools.marked import Marked
from jaxserve.tools.pattern import NAME, SPACE, character, many, maybe, text
from jaxserve.tools.scan import Cursor
from jaxserve.tools.streamed import CallStream, Form, Forms, json_form

MARKER, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID = maybe(text(ID), many(character(lambda char: char not in "[{")))


def mistral(schemas: Schemas) -> Parser:
    """Return a parser of one output. Calls last to the end of the output."""
    return Marked(Markers(MARKER, ""), _read, stream=lambda: CallStream(FORMS))


def _head_name(head: Cursor) -> str | None:
    head.skip()
    head.take(MARKER)
    return _name(head)


def _name(head: Cursor) -> str | None:
    """Return the name between the beginning of a call and its arguments; None if it is not written like one."""
    text, _ = head.until(ARGUMENTS)
    head.skip()
    return Cursor(text).until(ID)[0].strip() if head.done else None


LISTED = json_form(many(character(lambda char: char.isspace() or char in "[,")))  # calls in a JSON list
FORMS = Forms(
    LISTED,
    Form((SPACE, maybe(text(MARKER)), SPACE, NAME, SPACE, _ID, maybe(text(ARGUMENTS)), SPACE), _head_name, False),
)


def _read(body: Cursor) -> list[Call] | None:
    body.skip()
    if not body.text.startswith(("[", "{"), body.at):
        return _named(body)
    return read_list(body)


def read_list(body: Cursor, closing: str = "") -> list[Call] | None:
    """Return the calls of a JSON list, or a single one, and whitespace; `closing` may follow."""
    body.skip()
    value = body.value()
    body.skip()
    body.take(closing)
    body.skip()
    calls = [call_of(item) for item in (value if isinstance(value, list) else [value])]
    good = [call for call in calls if call is not None]
    return good if good and len(good) == len(calls) and body.done else None


def _named(body: Cursor) -> list[Call] | None:
    calls: list[Call] = []
    while not body.done:
        head, brace = body.until("{")
        body.at -= brace
        name, arguments = _name(Cursor(head)), body.value()
        if not name or not isinstance(arguments, dict):
            return None
        calls.append(Call(name, written(arguments)))
        body.skip()
        if not body.done and not body.take(MARKER):
            return None
    return calls or None
