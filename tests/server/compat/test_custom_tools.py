"""Custom tools in chat, as OpenAI has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.server.live import MODEL, Live
from tests.support.server.peers import differs

PATCH = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "edit"'}},
    },
}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PLAIN = {"type": "custom", "custom": {"name": "note"}}
TOOLS: list[Any] = [PATCH, ADD, PLAIN]
HI: list[Any] = [{"role": "user", "content": "Hi"}]
FIELD = {"custom": "input", "function": "arguments"}
Say = Callable[[str], Live]


def text_of(*calls: tuple[str, str]) -> str:
    return "".join(f'<tool_call>{{"name": "{name}", "arguments": {given}}}</tool_call>' for name, given in calls)


# (calls as the model writes them, calls of the answer)
CALLS: list[tuple[list[tuple[str, str]], list[tuple[str, str, str]]]] = [
    ([("patch", '{"input": "edit\\n\\u00e9\\"x"}')], [("custom", "patch", 'edit\né"x')]),
    ([("note", '{"input": ""}')], [("custom", "note", "")]),
    ([("patch", '{"input": "a"}'), ("add", '{"b": 1}'), ("note", '{"input": "c"}')],
     [("custom", "patch", "a"), ("function", "add", '{"b": 1}'), ("custom", "note", "c")]),
    ([("patch", '{"input": "a"}'), ("patch", '{"input": "b"}')], [("custom", "patch", "a"), ("custom", "patch", "b")]),
    ([("patch", '{"other": 1}')], [("custom", "patch", '{"other": 1}')]),
    ([("patch", '{"input": {"a": 1}}')], [("custom", "patch", '{"a": 1}')]),
]  # fmt: skip


@pytest.mark.parametrize(("written", "calls"), CALLS)
@differs(
    "OpenAI",
    "streams the input of a custom tool as it is written",
    "it comes in one piece: the model writes it as JSON",
)
def test_a_call_has_its_input(say: Say, written: list[tuple[str, str]], calls: list[tuple[str, str, str]]) -> None:
    client = say(text_of(*written)).client
    given: dict[str, Any] = {"model": MODEL, "messages": HI, "tools": TOOLS}
    choice = client.chat.completions.create(**given).choices[0]
    assert choice.finish_reason == "tool_calls"
    whole = [call.to_dict() for call in choice.message.tool_calls or ()]
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**given, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            call: dict[str, Any] = part.to_dict()
            at = call.pop("index")
            if "id" in call:
                assert at == len(streamed)
                streamed.append(call)
                continue
            ((kind, more),) = call.items()
            for field, text in more.items():
                streamed[at][kind][field] += text
    for found in (whole, streamed):
        bodies = [(call["type"], call[call["type"]]) for call in found]
        assert [(kind, body["name"], body[FIELD[kind]]) for kind, body in bodies] == calls


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_call_has_what_there_is(say: Say, stream: bool) -> None:
    live = say('<tool_call>{"name": "patch", "arguments": {"input": "abc def')
    answer = live.http.post("/v1/chat/completions", json={"messages": HI, "tools": TOOLS, "stream": stream})
    assert "abc def" in answer.text and '"custom"' in answer.text, answer.text


@differs(
    "OpenAI",
    "enforces the grammar of a custom tool",
    "it is described to the model, not enforced",
)
def test_the_model_is_told_of_a_function(roomy: Live) -> None:
    roomy.client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS, max_tokens=1)
    prompt = roomy.sent()
    assert "Edits files." in prompt and "lark grammar" in prompt and '"name": "note"' in prompt


def test_calls_in_the_history_and_their_results(roomy: Live) -> None:
    call = {"id": "call_1", "type": "custom", "custom": {"name": "patch", "input": 'edit "x"'}}
    messages: list[Any] = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "patched"},
    ]
    roomy.client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=1)
    prompt = roomy.sent()
    assert prompt.index('{"input": "edit \\"x\\""}') < prompt.index("patched")


@pytest.mark.parametrize(
    ("choice", "offered"),
    [
        ("auto", {"patch", "add", "note"}),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [PLAIN]}}, {"note"}),
        ("none", set()),
    ],
)
def test_choices(roomy: Live, choice: Any, offered: set[str]) -> None:
    given = {"messages": HI, "tools": TOOLS, "tool_choice": choice, "max_tokens": 1}
    assert roomy.http.post("/v1/chat/completions", json=given).status_code == 200
    assert {name for name in ("patch", "add", "note") if f'"name": "{name}"' in roomy.sent()} == offered


def test_a_demanded_call_has_its_input(say: Say) -> None:
    live = say('{"input":"edit"}')
    given: dict[str, Any] = {"messages": HI, "tools": TOOLS, "max_tokens": 50}
    choice = {"type": "custom", "custom": {"name": "patch"}}
    answer = live.http.post("/v1/chat/completions", json={**given, "tool_choice": choice})
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": "edit"})


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tools": [{"type": "custom", "name": "flat"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "a", "description": 3}}]}, "tools[0].custom.description"),
        ({"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "x"}}}]}, "tools[0].custom.format"),
        ({"tools": [{"type": "custom", "custom": {"name": "a", "format": "x"}}]}, "tools[0].custom.format"),
        ({"tools": [PATCH, PATCH]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "other"}}}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "a"}}]}]},
         "messages[0].tool_calls[0].custom.input"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "messages[0].tool_calls[0].custom"),
    ],
)  # fmt: skip
def test_what_is_no_custom_tool_is_refused(plain: Live, given: dict[str, Any], field: str) -> None:
    body = {"messages": HI, "max_tokens": 1, **given}
    answer = plain.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
