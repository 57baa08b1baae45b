"""No output makes a parser examine more than a few characters for each of its own: counted, not timed."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxserve.tools
from jaxserve.tools import events, llama, scan
from jaxserve.tools.definitions import tools_of
from jaxserve.tools.events import DECODER, Event
from jaxserve.tools.families import REASONING_PARSERS, TOOL_PARSERS, Parsers
from jaxserve.tools.json_calls import BEGIN, END, SEPARATOR
from jaxserve.tools.pattern import Match
from jaxserve.tools.scan import Cursor, Finder, Scan, Trim
from jaxserve.tools.streamed import HEAD

MOST = 4  # characters examined for each one of an output
ONCE = 4 * HEAD  # at the beginning and the end of an output
OFFERED = [{"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}]
JSON = ['{"name": "a", "arguments": {', '{"name":"a",', '"arguments":', "{", "}", "[", "]", '"', "\\", ",", ":", ";"]
ANY = [" ", "\n", "x", "é", "0", "<", "[", "<|", "<think>", "</think>", "[THINK]", "[/THINK]"]
# What the outputs of a family are built of.
ALPHABETS = {
    "hermes": ["<tool_call>", "</tool_call>", "<tool_", *JSON],
    "qwen3_coder": ["<tool_call>", "</tool_call>", "<function=a>", "</function>", "<function=", "<parameter=",
                    "<parameter=b>", "</parameter>", ">", "/", *JSON[3:]],
    "minimax_m2": ["<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="a">', "</invoke>", "<invoke name=",
                   "<parameter name=", '<parameter name="b">', "</parameter>", ">", *JSON[3:]],
    "llama3_json": ["<|python_tag|>", '{"name": "a", "parameters": {', '{"type": "function", ', *JSON],
    "pythonic": ["<|python_tag|>", "[a(", "a(", "b=", "'", "(", ")", "-", "#", *JSON[3:]],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "a[ARGS]{", "a{", *JSON],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", BEGIN, SEPARATOR, END, "```json", "```",
                    f"{BEGIN}a{SEPARATOR}{{", f"{BEGIN}function{SEPARATOR}a", *JSON],
    "gpt_oss": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "assistant", "analysis",
                "commentary", "final", "to=", "functions.", "to=functions.a", *JSON],
    "granite": ["<|tool_call|>", "<tool_call>", "</tool_call>", "<|tool_", *JSON],
    "phi4_mini": ["<|tool_call|>", "<|/tool_call|>", "<|/tool", *JSON],
    "phi4_mini_json": ["functools[", "functools", "func", *JSON],
    "olmo3": ["<function_calls>", "</function_calls>", "a(", "b=", "'", ")", "\n", "true", "#", *JSON[3:]],
    "glm4": ["a\n{", "a\n", "a", *JSON],
    "glm45": ["<tool_call>", "</tool_call>", "<tool_call>a", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
              *JSON[3:]],
}  # fmt: skip


class Count:
    """The characters that the readers of `scan` and `pattern` examine."""

    def __init__(self) -> None:
        self.examined = 0

    def patched(self, patch: pytest.MonkeyPatch) -> None:
        def wrapped(kind: type, name: str, cost: Callable[..., int]) -> None:
            inner = getattr(kind, name)

            def outer(reader: Any, *given: Any) -> Any:
                before = getattr(reader, "at", 0)
                result = inner(reader, *given)
                self.examined += cost(reader, before, result, *given)
                return result

            patch.setattr(kind, name, outer)

        wrapped(Scan, "to_depth", lambda scan, before, end, text, depth, start=0: end - start)
        wrapped(Finder, "read", lambda finder, before, found, text, start: found.end - start)
        wrapped(Match, "read", lambda match, before, end, text, start: end - start)
        wrapped(Trim, "add", lambda trim, before, kept, text: min(2 * len(text), 1 + len(text) - len(text.strip())))
        wrapped(Cursor, "take", lambda cursor, before, found, mark: len(mark) if found else 1)
        for name in ("skip", "word", "until"):
            wrapped(Cursor, name, lambda cursor, before, *_: cursor.at - before)
        for module in (scan, events):
            patch.setattr(module, "DECODER", self)
        patch.setattr(llama, "ast", self)

    def raw_decode(self, text: str, at: int = 0) -> Any:
        try:
            value, end = DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            self.examined += error.pos - at
            raise
        except RecursionError:
            self.examined += len(text) - at
            raise
        self.examined += end - at
        return value, end

    def decode(self, text: str) -> Any:
        self.examined += len(text)
        return DECODER.decode(text)

    def parse(self, text: str, mode: str) -> ast.AST:
        self.examined += len(text)
        return ast.parse(text, mode=mode)

    def __getattr__(self, name: str) -> Any:
        return getattr(ast, name)


@pytest.fixture(scope="module")
def count() -> Iterator[Count]:
    with pytest.MonkeyPatch.context() as patch:
        made = Count()
        made.patched(patch)
        yield made


def read(count: Count, family: str, reasoning: str | None, pieces: list[str]) -> tuple[list[Event], int]:
    """Return the events of an output, and the characters that were examined."""
    parser = Parsers(family, reasoning).start(tools_of(OFFERED), "")
    count.examined = 0
    found = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    return found, count.examined


def joined(events: list[Event]) -> list[Event]:
    """Return events with those of one kind in a row joined, except the names of calls."""
    made: list[Event] = []
    for event in events:
        if made and event.kind != "call" and made[-1].kind == event.kind:
            made[-1] = Event(event.kind, made[-1].text + event.text)
        else:
            made.append(event)
    return made


@st.composite
def hostile(draw: st.DrawFn, family: str) -> str:
    """Draw texts of a family's markers, each of which may come many times."""
    marks = st.sampled_from([*ALPHABETS[family], *ANY])
    some = st.lists(marks, min_size=1, max_size=5).map("".join)
    parts = draw(st.lists(st.tuples(some, st.sampled_from([1, 1, 2, 50, 400])), min_size=1, max_size=5))
    return "".join(text * times for text, times in parts)


@pytest.mark.parametrize("family", TOOL_PARSERS)
@given(st.data(), st.lists(st.integers(0, 4000), max_size=8), st.sampled_from([None, *REASONING_PARSERS]))
def test_a_parser_examines_each_character_a_few_times(count, family, data, points, reasoning):
    text = data.draw(hostile(family))
    ends = sorted({min(point, len(text)) for point in points} | {0, len(text)})
    whole, examined = read(count, family, reasoning, [text])
    assert examined <= MOST * len(text) + ONCE
    for pieces in ([text[low:high] for low, high in pairwise(ends)], list(text)):
        streamed, examined = read(count, family, reasoning, pieces)
        assert joined(streamed) == joined(whole)
        assert examined <= MOST * len(text) + ONCE


CALL = '{"name": "a", "arguments": {}}'
# Outputs that took seconds: (family, what begins them, what they repeat).
BOMBS = [
    ("hermes", '<tool_call>"', "</tool_call>"),
    ("hermes", "<tool_call>", f'{CALL}{300 * " "}x"</tool_call><tool_call>'),
    ("deepseek_v3", '<｜tool▁calls▁begin｜>"', "<｜tool▁calls▁end｜>"),
    ("qwen3_coder", "<tool_call>", "<function=a>"),
    ("qwen3_coder", "<tool_call><function=a>", "<parameter=b>"),
    ("qwen3_coder", "", "<function=a>"),
    ("qwen3_coder", "<function=a>", "<parameter=b>"),
    ("qwen3_coder", "<function=a><parameter=b>", "</function>"),
    ("qwen3_coder", "", "<function=a></function> </tool_call>"),
    ("minimax_m2", "<minimax:tool_call>", "<invoke name="),
    ("mistral", "[TOOL_CALLS]", f"{CALL}, "),
    ("mistral", "[TOOL_CALLS]", 'a[ARGS]{"b": 1}[TOOL_CALLS]'),
    ("gpt_oss", "", "<|end|>"),
    ("gpt_oss", "assistant", "to= "),
    ("gpt_oss", "<|start|>assistant", "x"),
    ("llama3_json", "", f"{CALL}; "),
    ("granite", "<|tool_call|>", f"{CALL}, "),
    ("granite", '<tool_call>"', "</tool_call>"),
    ("phi4_mini", '<|tool_call|>"', "<|/tool_call|>"),
    ("phi4_mini_json", "functools[", f"{CALL},"),
    ("olmo3", '<function_calls>"', "</function_calls>"),
    ("olmo3", "<function_calls>", "a(b=1)\n"),
    ("glm4", "", 'a\n{"b": 1}'),
    ("glm45", "<tool_call>a", "<arg_key>"),
    ("glm45", "<tool_call>a", "<arg_key>b</arg_key><arg_value>1</arg_value>"),
    *((family, "", " ") for family in TOOL_PARSERS),
]


@pytest.mark.parametrize(("family", "first", "repeated"), BOMBS)
@pytest.mark.parametrize("reasoning", [None, "qwen3"])
def test_bombs_are_linear(count, family, first, repeated, reasoning):
    text = first + repeated * (10_000 // len(repeated)) + ("</tool_call>" if family == "qwen3_coder" else "")
    for pieces in ([text], list(text)):
        examined = read(count, family, reasoning, pieces)[1]
        assert examined <= MOST * len(text) + ONCE


def test_parsers_read_with_counted_readers_only():
    """Expressions, and methods of strings that search, would escape the count."""
    searching = {"find", "rfind", "index", "rindex", "split", "rsplit", "partition", "rpartition", "splitlines",
                 "count"}  # fmt: skip
    folder = Path(jaxserve.tools.__file__).parent
    for path in sorted({*folder.glob("*.py")} - {folder / f"{name}.py" for name in ("scan", "definitions", "prompt")}):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Import) and any(one.name == "re" for one in node.names)), path
            assert not (isinstance(node, ast.Attribute) and node.attr in searching), f"{path}:{node.lineno}"
