"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one call in each pair of tags."""

from __future__ import annotations

from jaxserve.tools.events import Call, Markers, Parser, Schemas, call_of
from jaxserve.tools.marked import Marked
from jaxserve.tools.scan import Cursor
from jaxserve.tools.streamed import CallStream, Forms, json_form

MARKERS = Markers("<tool_call>", "</tool_call>")
FORMS = Forms(json_form())


def hermes(schemas: Schemas) -> Parser:
    """Return a parser of one output."""
    return Marked(MARKERS, _read, stream=lambda: CallStream(FORMS))


def _read(body: Cursor) -> list[Call] | None:
    body.skip()
    call = call_of(body.value())
    body.skip()
    return [call] if call is not None and body.done else None
