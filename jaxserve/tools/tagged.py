"""MiniMax-M2 and Qwen3-Coder: calls as tags with one tag per parameter, whose text has the type of the schema."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from jaxserve.tools.events import Call, Markers, Parser, Schemas, loaded, written
from jaxserve.tools.hermes import MARKERS as QWEN
from jaxserve.tools.marked import Marked

MINIMAX = Markers("<minimax:tool_call>", "</minimax:tool_call>")
_INVOKE = re.compile(r'<invoke name="?([^">]+)"?>(.*?)</invoke>', re.DOTALL)
_NAMED = re.compile(r'<parameter name="?([^">]+)"?>(.*?)</parameter>', re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>]+)>(.*?)</function>", re.DOTALL)
_EQUAL = re.compile(r"<parameter=([^>]+)>(.*?)</parameter>", re.DOTALL)


def minimax_m2(schemas: Schemas) -> Parser:
    """Return a parser of one output."""
    return Marked(MINIMAX, partial(_read, schemas, _INVOKE, _NAMED), json=False)


def qwen3_coder(schemas: Schemas) -> Parser:
    """Return a parser of one output."""
    return Marked(QWEN, partial(_read, schemas, _FUNCTION, _EQUAL), json=False)


def _read(schemas: Schemas, calls: re.Pattern[str], parameters: re.Pattern[str], body: str) -> list[Call] | None:
    made = []
    for found in calls.finditer(body):
        name, given = found[1].strip(), parameters.findall(found[2])
        if parameters.sub("", found[2]).strip():
            return None  # something that is no parameter
        known = schemas.get(name, {}).get("properties", {})
        made.append(Call(name, written({key.strip(): value_of(text, known.get(key.strip())) for key, text in given})))
    return None if calls.sub("", body).strip() else made or None


def value_of(text: str, schema: Any) -> Any:
    """Return the value of a parameter that was written as text: a string if the schema asks for one, else JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    value = loaded(text.strip())
    kinds = schema.get("type") if isinstance(schema, dict) else None
    allowed = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, list) else set()
    if "string" in allowed and not (value is None and "null" in allowed and text.strip() == "null"):
        others = allowed - {"string", "null"}
        return value if others and value is not None and not isinstance(value, str) else text
    return text if value is None and text.strip() != "null" else value
