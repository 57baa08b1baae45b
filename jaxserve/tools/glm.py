"""GLM-4: an output that is a name, a line break and JSON. GLM-4.5: tags around each key and value."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxserve.tools.events import Call, Parser, Schemas, written
from jaxserve.tools.json_calls import HERMES
from jaxserve.tools.llama import WholeOutput
from jaxserve.tools.marked import Marked
from jaxserve.tools.pattern import NAME, SPACE, Pattern, text
from jaxserve.tools.scan import Cursor
from jaxserve.tools.streamed import CallStream, Form, Forms
from jaxserve.tools.tagged import value_of

KEY, VALUE = ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")
_HEAD = (SPACE, NAME, text("\n"), SPACE)


def _name(head: Cursor) -> str:
    head.skip()
    return head.word()


FORMS = Forms(Form(_HEAD, _name, False))
_BEGINS = Pattern((*_HEAD, text("{")))


def glm4(schemas: Schemas) -> Parser:
    """Return a parser of one output, which is a call if it begins with the name of a tool."""
    return WholeOutput(_BEGINS, lambda rest: [], CallStream(FORMS, schemas, idle=Cursor.skip))


def glm45(schemas: Schemas) -> Parser:
    """Return a parser of one output."""
    return Marked(HERMES, partial(_read, schemas), json=False)


def _read(schemas: Schemas, body: Cursor) -> list[Call] | None:
    name, arguments = _name(body), dict[str, Any]()
    known = schemas.get(name, {}).get("properties", {})
    body.skip()
    while body.take(KEY[0]):
        key, closed = body.until(KEY[1])
        body.skip()
        if not (closed and body.take(VALUE[0])):
            return None
        value, closed = body.until(VALUE[1])
        if not closed:
            return None
        arguments[key.strip()] = value_of(value, known.get(key.strip()))
        body.skip()
    return [Call(name, written(arguments))] if name and body.done else None
