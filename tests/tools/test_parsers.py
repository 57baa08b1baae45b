"""Parsers of calls and thinking: what each family writes, cut anywhere."""

from __future__ import annotations

import json
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from jaxserve.server.message import Message
from jaxserve.tools.definitions import tools_of
from jaxserve.tools.events import Event, Parser
from jaxserve.tools.families import REASONING_PARSERS, TOOL_PARSERS, Parsers
from jaxserve.tools.scan import Automaton, Finder, Scan

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "zip": {"type": ["string", "null"]}},
}
OFFERED = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]
TOOLS = tools_of(OFFERED)
SEP = "<｜tool▁sep｜>"

FORMS = {
    "hermes": '<tool_call>\n{"name": "time", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "time", "parameters": %s}',
    "mistral": '[TOOL_CALLS] [{"name": "time", "arguments": %s}]',
    "mistral v11": "[TOOL_CALLS]time[ARGS]%s",
    "deepseek_v3": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function{SEP}time\n```json\n%s\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseek_v3 of V3.1": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time{SEP}%s<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "gpt_oss": "<|channel|>commentary to=functions.time <|constrain|>json<|message|>%s<|call|>",
}
# (parser, text): tests/server/compat/test_tool_texts.py has what is read of such texts
WRITTEN = [
    *((form.split()[0], FORMS[form] % '{"city": "Pa;ris}", "days": 2}') for form in FORMS),
    ("hermes", 'I see.\n<tool_call>\n{"name": "time", "arguments": {"in": "</tool_call> \\" }"}}\n</tool_call>\n'
               '<tool_call>{"name": "time", "arguments": {}}'),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
                    "</parameter>\n</function>\n</tool_call>"),
    ("llama3_json", '<|python_tag|>{"name": "time", "parameters": {}}; {"name": "time", "parameters": {}}'),
    ("pythonic", "[weather(city='Paris', days=2), time()]"),
    ("mistral", 'Now [TOOL_CALLS] [{"name": "time", "arguments": {}}, {"name": "time", "arguments": {}, "id": "abc"}]'),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]time[CALL_ID]abcdefghi[ARGS]{}'),
    ("minimax_m2", 'I look.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
                   '</invoke>\n<invoke name="time">\n</invoke>\n</minimax:tool_call>\n'),
    ("gpt_oss", "<|channel|>analysis<|message|>Where?<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
                "<|end|><|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}"),
]  # fmt: skip
# Text that is no call: it must come back as it is.
GARBAGE = [
    ("hermes", '<tool_call>\n{"name": "weather", "argum'),
    ("hermes", '  <tool_call>{"name": "time", "arguments": [1]}</tool_call>'),
    ("qwen3_coder", "<tool_call>hello</tool_call>"),
    ("llama3_json", '{"name": "unknown", "parameters": {}}'),
    ("llama3_json", '{"city": "Paris"}'),
    ("pythonic", "[weather(print('x'))]"),
    ("pythonic", "[unknown()]"),
    ("pythonic", "[1, 2]"),
    ("mistral", "[TOOL_CALLS] [{]"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>what<｜tool▁calls▁end｜>"),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="weather">free</invoke></minimax:tool_call>'),
    ("gpt_oss", "Hello <|message|> there"),
]
# (parser, text, content, calls): arguments that are no JSON were passed on before that could be known
BROKEN = [
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city"</tool_call> and more ', "and more",
     [("weather", '{"city"')]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": NaN}}</tool_call><tool_ca', "<tool_ca",
     [("time", '{"a": NaN}')]),
    ("llama3_json", '{"name": "time", "parameters": {"a": 1', "", [("time", '{"a": 1')]),
    ("llama3_json", '{"name": "time", "parameters": {}}; {"name": "unknown", "parameters": {}}',
     '; {"name": "unknown", "parameters": {}}', [("time", "{}")]),
    ("mistral", '[TOOL_CALLS] [{"name": "time", "arguments": {}}, {"name": 7}]', ', {"name": 7}]', [("time", "{}")]),
    ("gpt_oss", "<|start|>assistant to=functions.time<|channel|>commentary json<|message|>now<|call|>", "now", []),
]  # fmt: skip


def run(parser: Parser, pieces: list[str]) -> list[Event]:
    """Return all events; those of one kind in a row are joined, except the names of calls."""
    found = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    made: list[Event] = []
    for kind, same in groupby(found, key=lambda event: event.kind):
        events = list(same)
        made += events if kind == "call" else [Event(kind, "".join(event.text for event in events))]
    return made


def parts(events: list[Event]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content and the calls, with the text of their arguments."""
    content, names, arguments = (
        [event.text for event in events if event.kind == kind] for kind in ("content", "call", "arguments")
    )
    return "".join(content), list(zip(names, arguments, strict=True))


def parser_of(name: str) -> Parser:
    return Parsers(name, None).start(TOOLS, "")


def cut(text: str, points: list[int]) -> list[str]:
    ends = sorted({min(point, len(text)) for point in points} | {0, len(text)})
    return [text[low:high] for low, high in pairwise(ends)]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"), [*BROKEN, *((name, text, text, []) for name, text in GARBAGE)]
)
def test_broken_calls_end_where_the_model_ended_them(name, text, content, calls):
    for pieces in ([text], list(text)):
        assert parts(run(parser_of(name), pieces)) == (content, calls)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab{}[]",\\\n </tool_call>é'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("form", FORMS)
@given(
    st.dictionaries(st.text(max_size=5), values, max_size=3),
    st.sampled_from([None, 2]),
    st.lists(st.integers(0, 400), max_size=8),
)
def test_arguments_are_passed_on_as_the_model_wrote_them(form, arguments, indent, points):
    text = json.dumps(arguments, ensure_ascii=False, indent=indent)
    events = run(parser_of(form.split()[0]), cut(FORMS[form] % text, points))
    assert events == [Event("call", "time"), Event("arguments", text)]


@pytest.mark.parametrize("form", FORMS)
def test_arguments_do_not_wait_for_their_end(form):
    parser = parser_of(form.split()[0])
    before, _ = FORMS[form].split("%s")
    events = [event for piece in [*before, '{"city": ', '"Par'] for event in parser.feed(piece)]
    assert events[0] == Event("call", "time")
    assert "".join(event.text for event in events[1:]) == '{"city": "Par'


def added_up(deltas: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content and the calls of a stream; each call begins with its id and its name, once."""
    content, calls, ids = "", list[tuple[str, str]](), set()
    for delta in deltas:
        content += delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                ids.add(part["id"])
                calls.append((part["function"].pop("name"), ""))
            assert part["index"] == len(calls) - 1 and set(part["function"]) == {"arguments"}
            assert "id" not in part or part["function"]["arguments"] == ""
            calls[-1] = (calls[-1][0], calls[-1][1] + part["function"]["arguments"])
    assert len(ids) == len(calls) == sum("id" in part for one in deltas for part in one.get("tool_calls", ()))
    return content, calls


@given(st.data(), st.lists(st.integers(0, 400), max_size=8))
def test_a_stream_adds_up_to_the_whole_message(data, points):
    name, text = data.draw(st.sampled_from([one[:2] for one in [*WRITTEN, *GARBAGE, *BROKEN]]))
    whole = Message(parser_of(name)).whole(text)
    called = [one["function"] for one in whole.get("tool_calls", ())]
    streamed = Message(parser_of(name))
    deltas = [delta for piece in cut(text, points) for delta in streamed.add(piece)] + streamed.finish()
    calls = [(one["name"], one["arguments"]) for one in called]
    assert added_up(deltas) == (whole["content"] or "", calls)


MARKS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<minimax:tool_call>",
    "</minimax:tool_call>", '<invoke name="weather">', "</invoke>", "<think>", "</think>", "[THINK]", "[/THINK]",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<|channel|>", "final", "analysis", "<|message|>", "<|end|>",
    "<|start|>", "<|call|>", '{"name": "time", "arguments": {}}', "[time()]", '"', "\\", "\n", " ", "<", "a", "é",
]  # fmt: skip
texts = st.one_of(
    st.sampled_from([text for _, text in WRITTEN] + [text for _, text in GARBAGE]),
    st.lists(st.sampled_from(MARKS), max_size=12).map("".join),
    st.text(max_size=30),
)


@given(texts, st.lists(st.integers(0, 400), max_size=8), st.sampled_from([None, *REASONING_PARSERS]), st.booleans())
@example("<think>a</think>\n<tool_call>", [3], "qwen3", False)
def test_how_text_is_cut_does_not_matter(text, points, reasoning, parallel):
    tools = tools_of(OFFERED, None, parallel)
    for name in TOOL_PARSERS:
        parsers = Parsers(name, reasoning)
        assert run(parsers.start(tools, ""), cut(text, points)) == run(parsers.start(tools, ""), [text])


@given(st.text(max_size=60), st.sampled_from(sorted(TOOL_PARSERS)))
def test_text_without_calls_is_kept(text, name):
    assert "".join(event.text for event in run(parser_of(name), list(text))) == text


@given(st.lists(st.sampled_from(["a", " ", "\n", "b c", '<tool_call>{"name": "time"}</tool_call>']), max_size=10))
def test_content_is_the_text_outside_of_calls(parts):
    """Only whitespace next to calls is left out, and every call is reported."""
    events = run(parser_of("hermes"), parts)
    calls = [part for part in parts if part.startswith("<")]
    content = "".join(part for part in parts if not part.startswith("<"))
    assert sum(event.kind == "call" for event in events) == len(calls)
    found = "".join(event.text for event in events if event.kind == "content")
    assert "".join(found.split()) == "".join(content.split())
    assert calls or found == content


@pytest.mark.parametrize(
    ("parts", "content"),
    [
        (["a ", 0, " b"], "a b"), (["a", 0, "b"], "a b"), (["a\n\n", 0, 0, "\nb"], "a\n\nb"), ([" ", 0, " b"], "b"),
        (["a ", 0, " \n"], "a"), (["a ", 0, " b ", 0, " c"], "a b c"), (["a ", 0, " ", 0, " b"], "a b"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_texts_around_a_call_are_apart(name, parts, content):
    call = {"hermes": '{"name": "time", "arguments": {}}', "qwen3_coder": "<function=time></function>"}[name]
    text = "".join(f"<tool_call>{call}</tool_call>" if part == 0 else part for part in parts)
    for pieces in ([text], list(text)):
        events = run(parser_of(name), pieces)
        assert "".join(event.text for event in events if event.kind == "content") == content


CITY = "<parameter=city>\nParis\n</parameter>\n"
# (text, content, calls): Qwen3-Coder's calls without <tool_call>
BARE = [
    (f"<function=weather>\n{CITY}</function>", "", [("weather", {"city": "Paris"})]),
    (f"<function=weather>\n{CITY}</function>\n</tool_call>", "", [("weather", {"city": "Paris"})]),
    ("<function=time></function>", "", [("time", {})]),
    ("I look.\n<function=time>\n</function>\n<function=weather></function>\n", "I look.",
     [("time", {}), ("weather", {})]),
    ("<tool_call><function=time></function></tool_call>\n<function=weather></function>", "",
     [("time", {}), ("weather", {})]),
    ("<function=time></function><tool_call><function=weather></function></tool_call>", "",
     [("time", {}), ("weather", {})]),
    ("<function=weather><parameter=city></function>\n</tool_call></parameter></function>", "",
     [("weather", {"city": "</function>\n</tool_call>"})]),
    ("<function=time></function> done </tool_call>", "done </tool_call>", [("time", {})]),
    ("<function=time></function></tool_call></tool_call>", "</tool_call>", [("time", {})]),
    ("Write `<function=time>`: <tool_call><function=time></function></tool_call>", "Write `<function=time>`:",
     [("time", {})]),
    (f"<function=time>\n<function=weather>{CITY}</function>", "<function=time>", [("weather", {"city": "Paris"})]),
    ("<function=time>\n<parameter=a>1</parameter><tool_call><function=time></function></tool_call>",
     "<function=time>\n<parameter=a>1</parameter>", [("time", {})]),
    *((text, text, []) for text in (
        "<function=unknown></function>", "<function=time> now", "<function=time", "<function=", "<function=time></func",
        "<function=weather><parameter=city>Paris", f"<function=weather>{CITY}", "</function> </tool_call>",
        "<parameter=a>", f"<function=weather>{CITY}text</function>",
        "<function=" + "x" * 500 + "></function>", "<function=<function=",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), BARE)
def test_calls_without_markers(text, content, calls):
    for pieces in ([text], list(text)):
        events = run(parser_of("qwen3_coder"), pieces)
        assert "".join(event.text for event in events if event.kind == "content") == content
        assert [event.text for event in events if event.kind == "call"] == [name for name, _ in calls]
        written = [json.loads(event.text) for event in events if event.kind == "arguments"]
        assert written == [arguments for _, arguments in calls]


def test_what_is_no_call_does_not_wait():
    parser = parser_of("qwen3_coder")
    text = "A call begins with <function=time> and then " + "words " * 100
    assert len("".join(event.text for event in parser.feed(text))) > len(text) - 10


THOUGHTS = [
    ("qwen3", "", "<think>\nhm\n\nso\n</think>\n\nYes. ", "hm\n\nso", "Yes. "),
    ("deepseek_r1", "<think>\n", "hm </think> Yes", "hm", "Yes"),
    ("qwen3", "<think>\n\n</think>\n\n", "Yes </think>", "", "Yes </think>"),  # thinking is switched off
    ("minimax_m2", "<think>", "never ends", "never ends", ""),
    ("mistral", "", "[THINK]hm[/THINK]Yes", "hm", "Yes"),
    ("gpt_oss", "", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes", "hm",
     "Yes"),
    ("qwen3", "", "  <thin> no", "", "  <thin> no"),
    ("granite", "", "Here is my thought process: hm\nHere is my response: Yes.", "hm", "Yes."),
    ("granite", "", "Here's my thought process: hm\nHere's my response: Yes.", "hm", "Yes."),
    ("granite", "", "Here's my thought process: Here's my hm\nHere is my response: Yes.", "Here's my hm", "Yes."),
    ("granite", "", "Here's my thought: no", "", "Here's my thought: no"),
    ("granite", "", "Here is my thought: no", "", "Here is my thought: no"),
    ("granite_3_3", "", "<think>hm</think>\n\n<response>\nYes, </resp>. </response>\n", "hm", "Yes, </resp>."),
    ("granite_3_3", "", "<think>hm</think><resp> Yes", "hm", "<resp> Yes"),
    ("granite_3_3", "", "<think>hm</think><res", "hm", "<res"),
    ("granite_3_3", "", "<response>Yes</response>", "", "<response>Yes</response>"),  # the model was not told of it
]  # fmt: skip


@pytest.mark.parametrize(("name", "prompt", "text", "thought", "answer"), THOUGHTS)
def test_thinking_is_told_from_the_answer(name, prompt, text, thought, answer):
    for pieces in ([text], list(text)):
        events = run(Parsers(None, name).start(None, prompt), pieces)
        assert "".join(event.text for event in events if event.kind == "reasoning") == thought
        assert "".join(event.text for event in events if event.kind == "content") == answer


CALLS = '[{"name": "weather", "arguments": {"city": "}]\\"", "days": 1}}, {"name": "time", "arguments": {}}]'


@given(st.lists(st.integers(0, 100), max_size=9))
def test_required_calls_are_passed_on_as_they_arrive(points):
    parser = Parsers(None, None).start(tools_of(OFFERED, "required"), "")
    assert run(parser, cut(CALLS, points)) == [
        Event("call", "weather"),
        Event("arguments", '{"city": "}]\\"", "days": 1}'),
        Event("call", "time"),
        Event("arguments", "{}"),
    ]


def test_arguments_of_required_calls_do_not_wait_for_their_end():
    parser = Parsers(None, None).start(tools_of(OFFERED, "required"), "")
    events = parser.feed('[{"name": "weather", "arguments": {"city": "Pa')
    assert events == [Event("call", "weather"), Event("arguments", "{"), Event("arguments", '"city": "Pa')]
    named = Parsers(None, None).start(tools_of(OFFERED, {"type": "function", "function": {"name": "time"}}), "")
    assert named.feed(' {"a') == [Event("call", "time"), Event("arguments", '{"a')]


def test_calls_after_thinking():
    text = 'so</think>\n\n<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    events = run(Parsers("hermes", "qwen3").start(TOOLS, "<think>\n"), list(text))
    assert events == [Event("reasoning", "so"), Event("call", "time"), Event("arguments", "{}")]


@given(
    st.text(alphabet="ab<", max_size=30),
    st.lists(st.text(alphabet="ab<", max_size=4).map("<".__add__), min_size=1, max_size=3),
    st.lists(st.integers(0, 30), max_size=5),
)
def test_the_first_mark_is_found_however_the_text_is_cut(text, marks, points):
    assume(not any(one != other and one in other for one in marks for other in marks))
    ends = [(text.find(mark) + len(mark), -len(mark), mark) for mark in marks if mark in text]
    finder, found = Finder(Automaton(marks)), ""
    for piece in cut(text, points):
        before, mark, _ = finder.read(piece, 0)
        found += before
        if mark:
            end, size, expected = min(ends)
            assert (found, mark) == (text[: end + size], expected)
            return
    assert not ends and found + finder.rest() == text


@given(st.text(), st.integers(0, 40))
def test_scan_knows_whether_text_ends_inside_a_string(value, at):
    text = json.dumps({"k": value}, ensure_ascii=False)
    start, end = len('{"k": "'), len(text) - 2
    at = min(at, end - start)
    first, whole = Scan(), Scan()
    first.to_depth(text[: start + at], None)
    whole.to_depth(text, None)
    assert first.inside and not whole.inside
