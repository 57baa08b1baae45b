"""DeepSeek V3, R1 and V3.1: calls in markers of their own; the older ones have their arguments in a code block."""

from __future__ import annotations

import re

from jaxserve.tools.events import Call, Markers, Parser, Schemas, loaded, written
from jaxserve.tools.marked import Marked
from jaxserve.tools.streamed import CallStream, Form

MARKERS = Markers("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FORMS = (
    Form(
        re.compile(
            rf"[\s`]*(?:{END})?\s*{BEGIN}\s*(?:function{SEPARATOR})?(?P<name>[\w.\-]+)"
            rf"(?:\s*```json\s*|{SEPARATOR}\s*)(?=\{{)"
        ),
        False,
    ),
)
_FENCED = re.compile(r"([^\n]+)\n```json\n(.*)\n```", re.DOTALL)


def deepseek_v3(schemas: Schemas) -> Parser:
    """Return a parser of one output."""
    return Marked(MARKERS, _read, stream=lambda: CallStream(FORMS, idle=rf"[\s`]*(?:{END})?\s*"))


def _read(body: str) -> list[Call] | None:
    calls: list[Call] = []
    for part in body.split(BEGIN)[1:]:
        first, _, second = part.strip().removesuffix(END).partition(SEPARATOR)
        fenced = _FENCED.fullmatch(second.strip()) if first.strip() == "function" else None
        name, text = (fenced[1], fenced[2]) if fenced else (first, second)
        arguments = loaded(text.strip())
        if not name.strip() or not isinstance(arguments, dict):
            return None
        calls.append(Call(name.strip(), written(arguments)))
    return calls or None
