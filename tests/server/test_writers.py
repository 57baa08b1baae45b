"""Responses and messages from the chunks of chat: however they are cut, events add up to the whole answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.generation.generate import Submission
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.slo import SLO
from jaxserve.server.answers import Answer
from jaxserve.server.messages import writer as _messages
from jaxserve.server.responses import writer as _responses
from jaxserve.server.responses.items import messages_of_items
from jaxserve.server.responses.request import ResponsesBody
from tests.support.server import vendors

USAGE = {
    "prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13, "prompt_tokens_details": {"cached_tokens": 5},
    "completion_tokens_details": {"reasoning_tokens": 2},
}  # fmt: skip
PARTS = st.lists(st.text("ab é", min_size=1, max_size=3), max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(["f", "g"]), st.dictionaries(st.text("xy", max_size=2), st.integers())),
                 max_size=3)  # fmt: skip


def answer() -> Answer:
    job = Submission(NewRequest(range(9), SamplingParams(), SLO(1.0, 1.0)))
    tokenizer: Any = None
    return Answer("chatcmpl-1", "m", True, [job], tokenizer, None, False)


def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": delta, "finish_reason": finish_reason}]}


def chunks(thoughts: list[str], texts: list[str], calls: list[Any], reason: str) -> list[dict[str, Any]]:
    """Return the chunks of a chat completion, with the arguments of calls in two parts."""
    made = [chunk({"role": "assistant", "content": ""})]
    made += [chunk({"reasoning_content": text}) for text in thoughts]
    made += [chunk({"content": text}) for text in texts]
    for at, (name, filled) in enumerate(calls):
        arguments = json.dumps(filled)
        begun = {"index": at, "id": f"c{at}", "function": {"name": name, "arguments": ""}}
        made.append(chunk({"tool_calls": [begun]}))
        for part in (arguments[:2], arguments[2:]):
            made.append(chunk({"tool_calls": [{"index": at, "function": {"arguments": part}}]}))
    return [*made, chunk({}, reason), {"choices": [], "usage": USAGE}]


def whole(thoughts: list[str], texts: list[str], calls: list[Any], reason: str) -> dict[str, Any]:
    """Return one chunk with everything."""
    called = [
        {"index": at, "id": f"c{at}", "function": {"name": name, "arguments": json.dumps(filled)}}
        for at, (name, filled) in enumerate(calls)
    ]
    message = {"reasoning_content": "".join(thoughts), "content": "".join(texts), "tool_calls": called}
    return {**chunk(message, reason), "usage": USAGE}


def run(writer: Any, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    events = list(writer.begin())
    for one in given:
        events += writer.add(one)
    return [*events, *writer.finish()]


def no_ids(value: Any) -> Any:
    """Return JSON without the ids and times that differ from answer to answer."""
    if isinstance(value, dict):
        drop = ("id", "created_at", "completed_at")
        return {name: no_ids(inner) for name, inner in value.items() if name not in drop}
    return [no_ids(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("reason", ["stop", "length"])
@given(PARTS, PARTS, CALLS)
def test_the_events_of_a_response(reason: str, thoughts: list[str], texts: list[str], calls: list[Any]) -> None:
    done: list[dict[str, Any]] = []

    def writer() -> _responses.ResponseWriter:
        body = ResponsesBody(input="x")
        return _responses.ResponseWriter(_responses.new_response(body, answer(), False), done.append)

    one, other = writer(), writer()
    events = run(one, chunks(thoughts, texts, calls, reason))
    run(other, [whole(thoughts, texts, calls, reason)])
    vendors.response().validate_python(one.answer)
    assert no_ids(one.answer) == no_ids(other.answer)
    assert done == [one.answer, other.answer]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        vendors.response_event().validate_python(event)
    # Each item is added, written and done before the next, and is what the response has in the end.
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == one.answer["output"]
    at = [event["output_index"] for event in events if "output_index" in event]
    assert at == sorted(at) and set(at) == set(range(len(items)))
    for index, item in enumerate(items):
        deltas = "".join(e["delta"] for e in events if e["type"].endswith(".delta") and e["output_index"] == index)
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    kinds = [item["type"] for item in items]
    assert kinds == ["reasoning"] * bool(thoughts) + ["message"] * bool(texts or not (thoughts or calls)) + [
        "function_call"
    ] * len(calls)
    assert one.answer["usage"]["input_tokens_details"]["cached_tokens"] == 5
    assert one.answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    # What is stored for the next turn is the message of chat.
    (turn,) = messages_of_items(one.answer["output"])
    assert turn["content"] in ("".join(texts), [{"type": "text", "text": "".join(texts)}])
    assert turn.get("reasoning_content", "") == "".join(thoughts)
    assert [call["function"]["name"] for call in turn.get("tool_calls", ())] == [name for name, _ in calls]


@given(PARTS, PARTS, CALLS)
def test_logprobs_begin_no_items(thoughts: list[str], texts: list[str], calls: list[Any]) -> None:
    """Every token has some, also those of thinking and of calls, which come in several chunks."""
    entry = {"token": "x", "logprob": -1.0, "bytes": [120], "top_logprobs": []}
    given = chunks(thoughts, texts, calls, "stop")
    for one in given[1:-2]:
        one["choices"][0]["logprobs"] = {"content": [entry]}
    plain, scored = (
        _responses.ResponseWriter(_responses.new_response(ResponsesBody(input="x"), answer(), False), lambda _: None)
        for _ in range(2)
    )
    events = run(scored, given)
    run(plain, chunks(thoughts, texts, calls, "stop"))
    assert [one["type"] for one in scored.answer["output"]] == [one["type"] for one in plain.answer["output"]]
    told = [entry for event in events for entry in event.get("logprobs", ()) if event["type"].endswith(".delta")]
    written = [one["content"][0] for one in scored.answer["output"] if one["type"] == "message"]
    assert told == [entry for part in written for entry in part["logprobs"]]
    assert not texts or len(told) >= len(thoughts) + len(texts)


@pytest.mark.parametrize(
    ("reason", "told"), [("stop", "end_turn"), ("length", "max_tokens"), ("tool_calls", "tool_use")]
)
@given(PARTS, PARTS, CALLS)
def test_the_events_of_a_message(
    reason: str, told: str, thoughts: list[str], texts: list[str], calls: list[Any]
) -> None:
    one, other = (_messages.MessageWriter(_messages.new_message(answer())) for _ in range(2))
    events = run(one, chunks(thoughts, texts, calls, reason))
    run(other, [whole(thoughts, texts, calls, reason)])
    vendors.message().validate_python(one.answer)
    assert no_ids(one.answer) == no_ids(other.answer)
    for event in events:
        if event["type"] != "ping":
            vendors.message_event().validate_python(event)
    assert one.answer["stop_reason"] == told
    assert one.answer["usage"] == {
        "input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 5, "output_tokens": 4,
    }  # fmt: skip
    at = [event["index"] for event in events if "index" in event]
    assert at == sorted(at)
    for index, block in enumerate(one.answer["content"]):
        mine = [event for event in events if event.get("index") == index]
        kinds = [event["type"] for event in mine]
        assert kinds == ["content_block_start", *["content_block_delta"] * (len(mine) - 2), "content_block_stop"]
        deltas = "".join(str(list(event["delta"].values())[1]) for event in mine[1:-1])
        if block["type"] == "tool_use":
            assert json.loads(deltas) == block["input"]
        else:
            assert deltas == block.get("text", block.get("thinking"))


def test_arguments_that_are_cut_are_empty() -> None:
    """Anthropic's clients need an object; the partial text was streamed."""
    one = _messages.MessageWriter(_messages.new_message(answer()))
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"a'}}
    run(one, [chunk({"tool_calls": [call]}, "length")])
    assert one.answer["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]
