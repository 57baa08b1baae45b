"""The shape of answers and streams, as the tests of vLLM, SGLang and llama.cpp ask for it, in our words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.server.live import MODEL, Live

HI: list[Any] = [{"role": "user", "content": "Hi"}]
TEXT = "One two, thre\u00e9 \U0001f389 four."
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
USAGE = {"stream_options": {"include_usage": True}}
EACH = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
OFF = {"stream_options": {"include_usage": False}}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# What the model writes, and what the request asks for.
BODIES: list[tuple[str, str, dict[str, Any]]] = [
    (CHAT, TEXT, {}),
    (CHAT, TEXT, USAGE),
    (CHAT, TEXT, EACH),
    (CHAT, TEXT, OFF),
    (CHAT, TEXT, {"max_tokens": 1}),
    (CHAT, TEXT, {"max_completion_tokens": 3, **USAGE}),
    (CHAT, TEXT, {"n": 3, **USAGE}),
    (CHAT, TEXT, {"n": 2, "max_tokens": 1}),
    (CHAT, TEXT, {"logprobs": True, "top_logprobs": 0}),
    (CHAT, TEXT, {"logprobs": True, "top_logprobs": 2, "n": 2}),
    (CHAT, TEXT, {"stop": "four"}),
    (CHAT, TEXT, {"stop": ["One"]}),
    (CHAT, TEXT, {"stop": ["four"], "include_stop_str_in_output": True}),
    (CHAT, f"<think>{TEXT}</think>{TEXT}", USAGE),
    (CHAT, f"<think>{TEXT}</think>{TEXT}", {"include_reasoning": False}),
    (CHAT, f"<think>{TEXT}</think>{TEXT}", {"logprobs": True, "top_logprobs": 1}),
    (CHAT, f"{TEXT}{CALL}{CALL}", {"tools": TOOLS, **USAGE}),
    (CHAT, f"{TEXT}{CALL}{CALL}", {"tools": TOOLS, "parallel_tool_calls": False}),
    (CHAT, f"<think>{TEXT}</think>{CALL}", {"tools": TOOLS, "n": 2}),
    (CHAT, CALL, {"tools": TOOLS, "tool_choice": "none"}),
    (COMPLETIONS, TEXT, {}),
    (COMPLETIONS, TEXT, USAGE),
    (COMPLETIONS, TEXT, EACH),
    (COMPLETIONS, TEXT, {"max_tokens": 1}),
    (COMPLETIONS, TEXT, {"n": 2, **USAGE}),
    (COMPLETIONS, TEXT, {"prompt": ["Hi", "Ho"], **USAGE}),
    (COMPLETIONS, TEXT, {"prompt": ["Hi", "Ho"], "n": 2}),
    (COMPLETIONS, TEXT, {"prompt": [[5, 6], [7, 8]]}),
    (COMPLETIONS, TEXT, {"echo": True}),
    (COMPLETIONS, TEXT, {"echo": True, "n": 2, "logprobs": 1}),
    (COMPLETIONS, TEXT, {"prompt": [[5, 6], [7, 8]], "echo": True, "n": 2, "logprobs": 5, **USAGE}),
    (COMPLETIONS, TEXT, {"prompt": ["Hi", "Ho"], "n": 2, "logprobs": 5}),
    (COMPLETIONS, TEXT, {"echo": True, **USAGE}),
    (COMPLETIONS, TEXT, {"logprobs": 0}),
    (COMPLETIONS, TEXT, {"stop": ["two"]}),
    (COMPLETIONS, TEXT, {"suffix": None, "best_of": 1}),
]


def asked(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, **({"messages": HI} if path == CHAT else {"prompt": "Hi"}), "max_tokens": 400, **fields}


def joined(chunks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """Return what the chunks of a choice add up to."""
    result: dict[str, Any] = {"text": "", "thinking": "", "calls": {}, "reason": None, "scores": []}
    for choice in (item for chunk in chunks for item in chunk["choices"] if item["index"] == index):
        delta = choice.get("delta", choice)
        result["text"] += (delta.get("content") if "delta" in choice else choice["text"]) or ""
        result["thinking"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            name, arguments = result["calls"].get(call["index"], ("", ""))
            function = call["function"]
            result["calls"][call["index"]] = (name + function.get("name", ""), arguments + function["arguments"])
        result["reason"] = choice["finish_reason"] or result["reason"]
        scores = choice.get("logprobs") or {}
        result["scores"] += [item["logprob"] for item in scores.get("content") or ()] + scores.get("token_logprobs", [])
    return result


def whole(choice: dict[str, Any]) -> dict[str, Any]:
    """Return the same of a choice that is not streamed."""
    message, scores = choice.get("message", {}), choice.get("logprobs") or {}
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return {
        "text": (message.get("content") if message else choice["text"]) or "",
        "thinking": message.get("reasoning_content") or "",
        "calls": dict(enumerate(calls)),
        "reason": choice["finish_reason"],
        "scores": [item["logprob"] for item in scores.get("content") or ()] + scores.get("token_logprobs", []),
    }


@pytest.mark.parametrize(("path", "text", "fields"), BODIES)
def test_a_stream_is_its_whole_answer(say: Any, path: str, text: str, fields: dict[str, Any]) -> None:
    live: Live = say(text)
    body = asked(path, fields)
    answer = live.http.post(path, json={name: value for name, value in body.items() if name != "stream_options"})
    assert answer.status_code == 200, answer.text
    with live.http.stream("POST", path, json={**body, "stream": True}) as got:
        lines = [line for line in got.iter_lines() if line]
    assert lines.count("data: [DONE]") == 1 and lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    # Every chunk names the same answer.
    kind = "chat.completion.chunk" if path == CHAT else "text_completion"
    assert {(item["id"], item["created"], item["model"], item["object"]) for item in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], MODEL, kind)
    }
    # Usage: a last chunk without choices, or one in every chunk, or none.
    options = fields.get("stream_options", {})
    if options.get("include_usage"):
        last = chunks.pop()
        assert (last["choices"], last["usage"]) == ([], answer.json()["usage"])
    assert all(bool(item["choices"]) for item in chunks)
    assert all(bool(item.get("usage")) is bool(options.get("continuous_usage_stats")) for item in chunks)
    # Every choice: its role first and once, its end last and once, and in between what the whole answer has.
    choices = answer.json()["choices"]
    assert {item["index"] for chunk in chunks for item in chunk["choices"]} == set(range(len(choices)))
    for index, choice in enumerate(choices):
        own = [item for chunk in chunks for item in chunk["choices"] if item["index"] == index]
        assert [item["finish_reason"] is not None for item in own] == [False] * (len(own) - 1) + [True]
        if path == CHAT:
            assert ["role" in item["delta"] for item in own] == [True] + [False] * (len(own) - 1)
            assert own[-1]["delta"] == {}
        else:
            assert own[-1]["text"] == "" and all(item["text"] or item["logprobs"] for item in own[:-1])
        assert joined(chunks, index) == whole(choice)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_grows_with_the_stream(say: Any, path: str) -> None:
    live = say(TEXT)
    with live.http.stream("POST", path, json={**asked(path, EACH), "stream": True}) as got:
        lines = [line.removeprefix("data: ") for line in got.iter_lines() if line.startswith("data: {")]
    counts = [json.loads(line)["usage"]["completion_tokens"] for line in lines]
    assert counts == sorted(counts) and counts[-1] == len(live.engine.writes)
    assert {json.loads(line)["usage"]["prompt_tokens"] for line in lines} == {len(live.engine.submitted[-1].prompt)}


@pytest.mark.parametrize(
    ("text", "fields", "kinds", "reason"),
    [
        (TEXT, {}, ["text"], "end_turn"),
        (TEXT, {"max_tokens": 2}, ["text"], "max_tokens"),
        (TEXT, {"stop_sequences": ["four"]}, ["text"], "stop_sequence"),
        (TEXT, {"stop_sequences": ["One"]}, ["text"], "stop_sequence"),
        (f"<think>{TEXT}</think>{TEXT}", {}, ["thinking", "text"], "end_turn"),
        (f"<think>{TEXT}", {}, ["thinking"], "end_turn"),
        (CALL, {"tools": [{"name": "add", "input_schema": {"type": "object"}}]}, ["tool_use"], "tool_use"),
        (f"{TEXT}{CALL}{CALL}", {"tools": [{"name": "add", "input_schema": {"type": "object"}}]},
         ["text", "tool_use", "tool_use"], "tool_use"),
    ],
)  # fmt: skip
def test_a_message_and_its_stream(say: Any, text: str, fields: dict[str, Any], kinds: list[str], reason: str) -> None:
    """Anthropic's client puts the same message together from events as comes whole."""
    live = say(text)
    body = {"model": MODEL, "messages": HI, "max_tokens": 400, **fields}
    result = live.anthropic.messages.create(**body)
    with live.anthropic.messages.stream(**body) as stream:
        final = stream.get_final_message()
    for item in (result, final):
        assert ([block.type for block in item.content], item.stop_reason) == (kinds, reason)
        assert (item.stop_sequence is not None) is (reason == "stop_sequence")
    assert result.usage.input_tokens == final.usage.input_tokens > 0
    assert result.usage.output_tokens == final.usage.output_tokens > 0
    names = ("text", "thinking", "name", "input")
    told = [[[getattr(block, name, None) for name in names] for block in item.content] for item in (result, final)]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("text", "fields", "kinds", "status"),
    [
        (TEXT, {}, ["message"], "completed"),
        (TEXT, {"max_output_tokens": 2}, ["message"], "incomplete"),
        (f"<think>{TEXT}</think>{TEXT}", {}, ["reasoning", "message"], "completed"),
        (CALL, {"tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]},
         ["function_call"], "completed"),
        (f"{TEXT}{CALL}", {"tools": [{"type": "function", "name": "add", "parameters": {}, "strict": False}]},
         ["message", "function_call"], "completed"),
    ],
)  # fmt: skip
def test_a_response_and_its_stream(say: Any, text: str, fields: dict[str, Any], kinds: list[str], status: str) -> None:
    """Ids stay the same from event to event, and the last event has the whole response."""
    live = say(text)
    result = live.client.responses.create(model=MODEL, input="Hi", **fields)
    events = list(live.client.responses.create(model=MODEL, input="Hi", stream=True, **fields))
    last: Any = events[-1]
    assert last.type == f"response.{status}" and events[0].type == "response.created"
    for item in (result, last.response):
        assert ([item.type for item in item.output], item.status) == (kinds, status)
        assert item.id.startswith("resp_") and item.usage.output_tokens > 0
    assert result.output_text == last.response.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == result.output_text
    ids = [item.id for item in last.response.output]
    assert [event.item.id for event in events if event.type == "response.output_item.added"] == ids
    assert {event.item_id for event in events if hasattr(event, "item_id")} == set(ids)
