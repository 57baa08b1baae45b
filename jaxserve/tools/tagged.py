"""MiniMax-M2 and Qwen3-Coder: calls as tags with one tag per parameter, whose text has the type of the schema."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from jaxserve.tools.events import Call, Markers, Parser, Schemas, loaded, written
from jaxserve.tools.hermes import MARKERS as QWEN
from jaxserve.tools.marked import Marked
from jaxserve.tools.scan import Cursor

MINIMAX = Markers("<minimax:tool_call>", "</minimax:tool_call>")


class Tag(NamedTuple):
    """How an element is written: `opening`, its name, `>`, its content and `closing`."""

    opening: str
    closing: str


INVOKE, NAMED = Tag("<invoke name=", "</invoke>"), Tag("<parameter name=", "</parameter>")
FUNCTION, EQUAL = Tag("<function=", "</function>"), Tag("<parameter=", "</parameter>")


def minimax_m2(schemas: Schemas) -> Parser:
    """Return a parser of one output."""
    return Marked(MINIMAX, partial(_read, schemas, INVOKE, NAMED), json=False)


def qwen3_coder(schemas: Schemas) -> Parser:
    """Return a parser of one output."""
    return Marked(QWEN, partial(_read, schemas, FUNCTION, EQUAL), json=False)


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
    found = set[str]()
    alternatives = (schema.get(key) for key in ("anyOf", "oneOf", "allOf"))
    for one in [schema, *(one for given in alternatives if isinstance(given, list) for one in given)]:
        kinds = one.get("type") if isinstance(one, dict) else None
        found.update(kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
    return found | {"string" for value in values if isinstance(value, str)}
