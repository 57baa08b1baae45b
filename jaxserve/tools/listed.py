"""Granite 3 and Phi-4-mini: a JSON list of calls behind a marker."""

from __future__ import annotations

from functools import partial

from jaxserve.tools.events import Call, Markers, Parser, Schemas
from jaxserve.tools.hermes import MARKERS as HERMES
from jaxserve.tools.marked import Marked
from jaxserve.tools.mistral import LISTED, read_list
from jaxserve.tools.scan import Cursor
from jaxserve.tools.streamed import ENDS, CallStream, Forms

PHI = Markers("<|tool_call|>", "<|/tool_call|>")
FUNCTOOLS = "functools["  # of vLLM's template for Phi-4-mini; its bracket begins the list
FORMS = Forms(LISTED)


def granite(schemas: Schemas) -> Parser:
    """Return a parser of one output. Granite 3.0 writes a special token and later ones a tag, which need no end."""
    read = partial(read_list, closing=HERMES.closing)
    return Marked(Markers(PHI.opening, ""), read, stream=lambda: CallStream(FORMS, idle=_end), also=[HERMES.opening])


def phi4_mini(schemas: Schemas) -> Parser:
    """Return a parser of one output."""
    return Marked(PHI, read_list, stream=lambda: CallStream(FORMS))


def phi4_mini_json(schemas: Schemas) -> Parser:
    """Return a parser of one output, named as vLLM's."""
    return Marked(Markers(FUNCTOOLS, ""), _read_rest, stream=lambda: CallStream(FORMS))


def _end(rest: Cursor) -> None:
    rest.skip(ENDS)
    rest.take(HERMES.closing)
    rest.skip()


def _read_rest(body: Cursor) -> list[Call] | None:
    return read_list(Cursor("[" + body.rest))
