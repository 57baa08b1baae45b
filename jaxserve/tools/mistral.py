"""Mistral: `[TOOL_CALLS]` with a JSON list of calls, or a name, `[ARGS]` and arguments (from tokenizer v11 on)."""

from __future__ import annotations

import re

from jaxserve.tools.events import Call, Markers, Parser, Schemas, call_of, loaded, written
from jaxserve.tools.marked import Marked
from jaxserve.tools.streamed import CallStream, Form, json_form

MARKER, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
FORMS = (
    json_form(r"[\s\[,]*"),
    Form(
        re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*(?P<name>[\w.\-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)"),
        False,
    ),
)
_ID = re.compile(r"\[CALL_ID\].*", re.DOTALL)


def mistral(schemas: Schemas) -> Parser:
    """Return a parser of one output. Calls last to the end of the output."""
    return Marked(Markers(MARKER, ""), _read, stream=lambda: CallStream(FORMS))


def _read(body: str) -> list[Call] | None:
    if not body.lstrip().startswith(("[", "{")):
        return _named(body)
    found = loaded(body.strip())
    calls = [call_of(one) for one in (found if isinstance(found, list) else [found])]
    return _all(calls)


def _named(body: str) -> list[Call] | None:
    calls: list[Call | None] = []
    for part in body.split(MARKER):
        name, mark, text = part.partition(ARGUMENTS)
        if not mark:
            name, brace, text = part.partition("{")
            text = brace + text
        name, arguments = _ID.sub("", name).strip(), loaded(text.strip())
        calls.append(Call(name, written(arguments)) if name and isinstance(arguments, dict) else None)
    return _all(calls)


def _all(calls: list[Call | None]) -> list[Call] | None:
    """Return the calls if all of them could be read."""
    good = [call for call in calls if call is not None]
    return good if good and len(good) == len(calls) else None
