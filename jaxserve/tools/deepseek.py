"""DeepSeek V3, R1 and V3.1: calls in markers of their own; the older ones have their arguments in a code block."""

from __future__ import annotations

from jaxserve.tools.events import Call, Markers, Parser, Schemas, written
from jaxserve.tools.marked import Marked
from jaxserve.tools.pattern import NAME, SPACE, character, either, many, maybe, sequence, text
from jaxserve.tools.scan import Cursor
from jaxserve.tools.streamed import CallStream, Form, Forms

MARKERS = Markers("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```json"
_BETWEEN = (many(character(lambda char: char.isspace() or char == "`")), maybe(text(END)), SPACE)
_NAMED = (text(BEGIN), SPACE, maybe(text("function"), text(SEPARATOR)), NAME)
_OPENED = (either(sequence(SPACE, text(FENCE)), text(SEPARATOR)), SPACE)


def deepseek_v3(schemas: Schemas) -> Parser:
    """Return a parser of one output."""
    return Marked(MARKERS, _read, stream=lambda: CallStream(FORMS, idle=_end))


def _head_name(head: Cursor) -> str:
    head.until(BEGIN)
    return _name(head)


def _name(head: Cursor) -> str:
    """Return the name between the beginning of a call and its arguments; "" if it is not written like one."""
    name, separated = head.until(SEPARATOR)
    if separated and name.strip() == "function" and head.rest.strip():
        name = head.rest
    name, fenced = Cursor(name).until(FENCE)
    return name.strip() if separated or fenced else ""


FORMS = Forms(Form((*_BETWEEN, *_NAMED, *_OPENED), _head_name, False))


def _end(rest: Cursor) -> None:
    """Skip the end of a call."""
    rest.skip("`")
    rest.take(END)
    rest.skip()


def _read(body: Cursor) -> list[Call] | None:
    calls: list[Call] = []
    _, begins = body.until(BEGIN)
    while begins:
        head, brace = body.until("{")
        body.at -= brace
        name, arguments = _name(Cursor(head)), body.value()
        if not name or not isinstance(arguments, dict):
            return None
        calls.append(Call(name, written(arguments)))
        _end(body)
        begins = body.take(BEGIN)
    return calls if calls and body.done else None
