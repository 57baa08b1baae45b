"""Calls as JSON between markers: Hermes and Qwen, Granite 3, Phi-4-mini, Mistral and DeepSeek.

Hermes writes one object `{"name": ..., "arguments": {...}}` in each pair of tags; Granite, Phi and
Mistral write a list of them. From tokenizer v11 on, Mistral writes a name, `[ARGS]` and arguments.
DeepSeek V3, R1 and V3.1 mark name and arguments; the older ones have arguments in a code block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from jaxserve.tools.events import Call, Maker, Markers, call_of, written
from jaxserve.tools.marked import Marked, Reader
from jaxserve.tools.pattern import NAME, SPACE, character, either, many, maybe, sequence, text
from jaxserve.tools.scan import Cursor
from jaxserve.tools.streamed import ENDS, CallStream, Form, Forms, json_form

HERMES = Markers("<tool_call>", "</tool_call>")
PHI = Markers("<|tool_call|>", "<|/tool_call|>")
FUNCTOOLS = Markers("functools[", "")  # of vLLM's template for Phi-4-mini; its bracket begins the list
MISTRAL = Markers("[TOOL_CALLS]", "")  # calls last to the end of the output
ARGUMENTS, ID = "[ARGS]", "[CALL_ID]"
DEEPSEEK = Markers("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```json"


def _family(
    markers: Markers,
    read: Reader,
    *forms: Form,
    idle: Callable[[Cursor], object] = lambda rest: rest.skip(ENDS),
    also: Sequence[str] = (),
) -> Maker:
    """Return what makes the parsers of a family; the arguments are those of `Marked` and `CallStream`."""
    known = Forms(*forms)
    return lambda schemas: Marked(markers, read, stream=lambda: CallStream(known, idle=idle), also=also)


def _read_one(body: Cursor) -> list[Call] | None:
    body.skip()
    call = call_of(body.value())
    body.skip()
    return [call] if call is not None and body.done else None


def _read_list(body: Cursor, closing: str = "") -> list[Call] | None:
    """Return the calls of a JSON list, or a single one, and whitespace; `closing` may follow."""
    body.skip()
    value = body.value()
    body.skip()
    body.take(closing)
    body.skip()
    calls = [call_of(item) for item in (value if isinstance(value, list) else [value])]
    good = [call for call in calls if call is not None]
    return good if good and len(good) == len(calls) and body.done else None


def _read_named(
    body: Cursor, name: Callable[[Cursor], str | None], more: Callable[[Cursor], bool]
) -> list[Call] | None:
    """Return calls that are a name and arguments. more: skips the end of a call, and returns whether one follows."""
    calls: list[Call] = []
    follows = True
    while follows:
        head, brace = body.until("{")
        body.at -= brace
        called, arguments = name(Cursor(head)), body.value()
        if not called or not isinstance(arguments, dict):
            return None
        calls.append(Call(called, written(arguments)))
        follows = more(body)
    return calls if body.done else None


_LISTED = json_form(many(character(lambda char: char.isspace() or char in "[,")))  # calls in a JSON list


def _end_granite(rest: Cursor) -> None:
    rest.skip(ENDS)
    rest.take(HERMES.closing)
    rest.skip()


hermes = _family(HERMES, _read_one, json_form())
# Granite 3.0 writes a special token and later ones a tag, which need no end.
granite = _family(
    Markers(PHI.opening, ""),
    partial(_read_list, closing=HERMES.closing),
    _LISTED,
    idle=_end_granite,
    also=[HERMES.opening],
)
phi4_mini = _family(PHI, _read_list, _LISTED)
phi4_mini_json = _family(FUNCTOOLS, lambda body: _read_list(Cursor("[" + body.rest)), _LISTED)  # named as vLLM's


def _mistral_name(head: Cursor) -> str | None:
    """Return the name between the beginning of a call and its arguments; None if it is not written like one."""
    text, _ = head.until(ARGUMENTS)
    head.skip()
    return Cursor(text).until(ID)[0].strip() if head.done else None


def _mistral_head(head: Cursor) -> str | None:
    head.skip()
    head.take(MISTRAL.opening)
    return _mistral_name(head)


def _mistral_more(body: Cursor) -> bool:
    body.skip()
    return body.take(MISTRAL.opening) and not body.done


def _read_mistral(body: Cursor) -> list[Call] | None:
    body.skip()
    listed = body.text.startswith(("[", "{"), body.at)
    return _read_list(body) if listed else _read_named(body, _mistral_name, _mistral_more)


_MARKER = (SPACE, maybe(text(MISTRAL.opening)), SPACE)
_ID = maybe(text(ID), many(character(lambda char: char not in "[{")))
mistral = _family(
    MISTRAL,
    _read_mistral,
    _LISTED,
    Form((*_MARKER, NAME, SPACE, _ID, maybe(text(ARGUMENTS)), SPACE), _mistral_head, False),
)


def _deepseek_name(head: Cursor) -> str:
    """Return the name between the beginning of a call and its arguments; "" if it is not written like one."""
    name, separated = head.until(SEPARATOR)
    if separated and name.strip() == "function" and head.rest.strip():
        name = head.rest
    name, fenced = Cursor(name).until(FENCE)
    return name.strip() if separated or fenced else ""


def _deepseek_head(head: Cursor) -> str:
    head.until(BEGIN)
    return _deepseek_name(head)


def _end_deepseek(rest: Cursor) -> None:
    rest.skip("`")
    rest.take(END)
    rest.skip()


def _deepseek_more(body: Cursor) -> bool:
    _end_deepseek(body)
    return body.take(BEGIN)


_BETWEEN = (many(character(lambda char: char.isspace() or char == "`")), maybe(text(END)), SPACE)
_NAMED = (text(BEGIN), SPACE, maybe(text("function"), text(SEPARATOR)), NAME)
_OPENED = (either(sequence(SPACE, text(FENCE)), text(SEPARATOR)), SPACE)
deepseek_v3 = _family(
    DEEPSEEK,
    lambda body: _read_named(body, _deepseek_name, _deepseek_more) if body.until(BEGIN)[1] else None,
    Form((*_BETWEEN, *_NAMED, *_OPENED), _deepseek_head, False),
    idle=_end_deepseek,
)
