"""Tools in responses and messages. The engine double repeats the prompt, and so the call that the user wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

MODEL = "jaxserve-demo"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALL = 'First. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>DONE'
OPENAI = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": None}
ANTHROPIC = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
Fake = Callable[..., Any]


@pytest.fixture
def live(fake: Fake) -> Any:
    return fake(max_model_len=4000)


def ask(live: Any, text: str = CALL, **fields: Any) -> Any:
    return live.client.responses.create(
        model=MODEL, input=text, tools=[OPENAI], max_output_tokens=2000, extra_body={"stop": ["DONE"]}, **fields
    )


def message(live: Any, **fields: Any) -> Any:
    given = {
        "messages": [{"role": "user", "content": CALL}],
        "tools": [ANTHROPIC],
        "stop_sequences": ["DONE"],
        **fields,
    }
    with live.anthropic.messages.stream(model=MODEL, max_tokens=2000, **given) as stream:
        streamed = stream.get_final_message()
    made = live.anthropic.messages.create(model=MODEL, max_tokens=2000, **given)
    assert [block.type for block in made.content] == [block.type for block in streamed.content]
    assert made.stop_reason == streamed.stop_reason
    return made


def test_a_response_calls_a_tool(live: Any) -> None:
    made = ask(live)
    call = made.output[-1]
    assert [item.type for item in made.output][-2:] == ["message", "function_call"]
    assert (call.name, call.arguments, call.status, made.status) == ("add", '{"a": 1}', "completed", "completed")
    assert made.tools[0].name == "add" and made.tool_choice == "auto"
    assert "Adds." in live.sent()
    with live.client.responses.stream(
        model=MODEL, input=CALL, tools=[OPENAI], max_output_tokens=2000, extra_body={"stop": ["DONE"]}
    ) as stream:
        seen = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.function_call_arguments.done" in seen
    assert [item.type for item in final.output] == [item.type for item in made.output]
    assert final.output[-1].arguments == '{"a": 1}'


def test_a_result_follows_its_call(live: Any) -> None:
    first = ask(live)
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "three"}
    live.client.responses.create(
        model=MODEL, input=[output], previous_response_id=first.id, tools=[OPENAI], max_output_tokens=1
    )
    stored = live.sent()
    live.client.responses.create(
        model=MODEL, input=[{"role": "user", "content": CALL}, *(item.to_dict() for item in first.output), output],
        tools=[OPENAI], max_output_tokens=1,
    )  # fmt: skip
    assert stored == live.sent() and stored.rindex('"a": 1') < stored.rindex("three")


def test_a_message_uses_a_tool(live: Any) -> None:
    made = message(live)
    assert [block.type for block in made.content][-2:] == ["text", "tool_use"]
    assert (made.content[-1].name, made.content[-1].input, made.stop_reason) == ("add", {"a": 1}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": made.content[-1].id, "content": "three"}
    turns = [
        {"role": "user", "content": CALL},
        {"role": "assistant", "content": [block.to_dict() for block in made.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    message(live, messages=turns)
    prompt = live.sent()
    assert prompt.rindex('"a": 1') < prompt.rindex("three") < prompt.rindex("So?")


def test_tools_count(live: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [ANTHROPIC]}
    counts = [
        live.http.post("/v1/messages/count_tokens", json={**body, **more}).json()["input_tokens"]
        for more in ({}, {"tools": []}, {"tool_choice": {"type": "none"}})
    ]
    assert counts[0] > counts[1] == counts[2]
