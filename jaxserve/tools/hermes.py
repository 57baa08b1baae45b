"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one call in each pair of tags."""

from __future__ import annotations

from jaxserve.tools.events import Call, Markers, Parser, Schemas, call_of, loaded
from jaxserve.tools.marked import Marked
from jaxserve.tools.streamed import CallStream, json_form

MARKERS = Markers("<tool_call>", "</tool_call>")
FORMS = (json_form(),)


def hermes(schemas: Schemas) -> Parser:
    """Return a parser of one output."""
    return Marked(MARKERS, _read, stream=lambda: CallStream(FORMS))


def _read(body: str) -> list[Call] | None:
    found = call_of(loaded(body.strip()))
    return None if found is None else [found]
