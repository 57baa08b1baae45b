"""What streams and whole answers of a model that thinks, calls and stops look like to clients."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from jaxserve.config import ServeConfig
from jaxserve.llm import LLM
from jaxserve.sched.api.params import SamplingParams
from tests.support.server.live import MODEL, Live
from tests.support.server.peers import differs

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": TOOL}]


def chunks(live: Live, path: str = "/v1/chat/completions", **body: Any) -> list[dict[str, Any]]:
    with live.http.stream("POST", path, json={"model": MODEL, **body, "stream": True}) as got:
        assert got.status_code == 200, got.read()
        return [json.loads(line[6:]) for line in got.iter_lines() if line.startswith("data: {")]


def both(live: Live, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the thinking, content, names of calls and finish reason of a chat answer, whole and streamed."""
    body = {"messages": HI, "max_tokens": 500, **body}
    result = live.http.post("/v1/chat/completions", json=body)
    assert result.status_code == 200, result.text
    choice = result.json()["choices"][0]
    message = choice["message"]
    whole = {
        "thinking": message.get("reasoning_content", ""),
        "content": message["content"] or "",
        "calls": [call["function"]["name"] for call in message.get("tool_calls") or ()],
        "reason": choice["finish_reason"],
    }
    result = chunks(live, **body)
    deltas = [item["choices"][0]["delta"] for item in result]
    called = [call for delta in deltas for call in delta.get("tool_calls", ())]
    streamed = {
        "thinking": "".join(delta.get("reasoning_content", "") for delta in deltas),
        "content": "".join(delta.get("content") or "" for delta in deltas),
        "calls": [call["function"]["name"] for call in called if "name" in call["function"]],
        "reason": result[-1]["choices"][0]["finish_reason"],
    }
    return whole, streamed


# F8: stop strings end the answer, not the thinking.
STOPS = [
    # what the model writes, its template's `thinking`, the stop strings, thinking and content
    ("<think>The Question: hm</think>Yes. Question: no", False, ["Question:"], "The Question: hm", "Yes. "),
    ("The Question: hm</think>Yes. Question: no", True, ["Question:"], "The Question: hm", "Yes. "),
    ("<think>a b</think>c d", False, ["a", "d"], "a b", "c "),
    ("\n<think>\n\nOne.\n\nTwo.</think>\n\nThree.\n\nFour.", False, ["\n\nF"], "One.\n\nTwo.", "Three."),
    ("Plain. Question: no", False, ["Question:"], "", "Plain. "),
    ("<thin air> Question: no", False, ["Question:"], "", "<thin air> "),
    ("<think>x</think><think>y Question: z</think>", False, ["Question:"], "x", "<think>y "),
    ("<think>never Question: ends", False, ["Question:"], "never Question: ends", ""),
    ("x</thi</think>abc", True, ["</thi", "c"], "x</thi", "ab"),
    ("  <thi", False, ["zzz"], "", "  <thi"),
]


@pytest.mark.parametrize(("text", "thinks", "stops", "thought", "content"), STOPS)
def test_stop_strings_end_the_answer(
    say: Any, text: str, thinks: bool, stops: list[str], thought: str, content: str
) -> None:
    for result in both(say(text), stop=stops, chat_template_kwargs={"thinking": thinks}):
        assert (result["thinking"], result["content"].strip("\n")) == (thought, content)
        assert result["reason"] == "stop"


def test_stop_strings_in_the_other_apis(say: Any) -> None:
    live = say("<think>The Question: hm</think>Yes. Question: no")
    result = live.anthropic.messages.create(model=MODEL, max_tokens=500, messages=HI, stop_sequences=["Question:"])
    assert [getattr(block, block.type) for block in result.content] == ["The Question: hm", "Yes. "]
    assert (result.stop_reason, result.stop_sequence) == ("stop_sequence", "Question:")
    answer = live.client.responses.create(model=MODEL, input="Hi", extra_body={"stop": ["Question:"]})
    assert [item.content[0].text for item in answer.output] == ["The Question: hm", "Yes. "]
    text = live.client.completions.create(model=MODEL, prompt="Hi", max_tokens=500, stop=["Question:"])
    assert text.choices[0].text == "<think>The ", "a text completion has no thinking of its own"


def test_stop_strings_offline(say: Any) -> None:
    live = say("<think>The Question: hm</think>Yes. Question: no")
    llm = LLM(config=ServeConfig(), engine=live.engine, tokenizer_object=live.service.tokenizer)
    params = SamplingParams(max_tokens=500, stop=("Question:",))
    (talk,) = llm.chat(HI, params, use_tqdm=False)
    assert talk.outputs[0].text == "<think>The Question: hm</think>Yes. "
    (text,) = llm.generate("Hi", params, use_tqdm=False)
    assert text.outputs[0].text == "<think>The "


# F13: tokens of the thinking, with its tags, are counted.
@pytest.mark.parametrize(
    ("text", "thinks", "thought"),
    [
        ("<think>One two three.</think>Four.", False, "<think>One two three.</think>"),
        ("One two three.</think>Four.", True, "One two three.</think>"),
        ("Four.", False, ""),
        ("<think>never ends", False, "<think>never ends"),
    ],
)
@pytest.mark.parametrize("stop", [[], ["zzz"]])
def test_thinking_is_counted(say: Any, text: str, thinks: bool, thought: str, stop: list[str]) -> None:
    live = say(text)
    # The tokens that hold the thinking: the last tag may share one with the answer.
    counts = [
        count
        for count in range(len(live.engine.writes) + 1)
        if len(live.service.tokenizer.decode(live.engine.writes[:count])) >= len(thought)
    ]
    extra = {"chat_template_kwargs": {"thinking": thinks}, "stop": stop}
    whole = live.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 500, **extra}).json()
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == counts[0]
    last = chunks(live, messages=HI, max_tokens=500, stream_options={"include_usage": True}, **extra)[-1]
    assert last["usage"] == whole["usage"]
    answer = live.client.responses.create(model=MODEL, input="Hi", max_output_tokens=500, extra_body=extra)
    assert answer.usage.output_tokens_details.reasoning_tokens == counts[0]
    text_usage = live.http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 5}).json()["usage"]
    assert "completion_tokens_details" not in text_usage


# F11: text, thinking, calls and their end are in chunks of their own.
ENDS = [
    ("Some text.", {}),
    ("Some text.", {"max_tokens": 2}),
    ("Some text.", {"logprobs": True, "top_logprobs": 1}),
    ("Some text.", {"stop": ["text"]}),
    ("<think>Thinking", {}),
    ("<think>Thinking", {"max_tokens": 6}),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', {"tools": TOOLS}),
    ('<tool_call>{"name": "add", "arguments": {"a": 1', {"tools": TOOLS}),
    ("Some text.", {"n": 2}),
]


@pytest.mark.parametrize(("text", "fields"), ENDS)
@differs(
    "vLLM",
    "the last text and `finish_reason` share a chunk",
    "they have chunks of their own, as with OpenAI",
)
def test_the_end_has_a_chunk_of_its_own(say: Any, text: str, fields: dict[str, Any]) -> None:
    live = say(text)
    result = [item["choices"][0] for item in chunks(live, **{"messages": HI, "max_tokens": 500, **fields})]
    ends = [choice for choice in result if choice["finish_reason"] is not None]
    assert [choice["delta"] for choice in ends] == [{}] * fields.get("n", 1)
    assert all(choice["logprobs"] is None for choice in ends)
    if fields.get("logprobs"):
        scored = [entry for choice in result for entry in (choice["logprobs"] or {}).get("content", ())]
        assert len(scored) == len(live.engine.writes)


# F17: a forced call that is cut before its name is no content.
@pytest.mark.parametrize("text", ["[", '[{"name":"', '[{"name": "ad', '[{"name":"add"', '[{"name":"add","arguments":'])
def test_a_cut_call_is_no_content(say: Any, text: str) -> None:
    live = say(text)
    cut = {"max_tokens": len(live.engine.writes), "tools": TOOLS, "tool_choice": "required"}
    for result in both(live, **cut):
        assert (result["content"], result["calls"]) == ("", [])


# F16: offsets are positions in the text.
@pytest.mark.parametrize(
    "text", ["plain words here", "é à la carte", "one 😀 two 🎉🎉 three", "汉字 and あいう", "naïve <think> é"]
)
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_are_positions_in_the_text(say: Any, text: str, echo: bool) -> None:
    live = say(text)
    body = {"prompt": "Café 😀: ", "max_tokens": 500, "logprobs": 1, "echo": echo}
    choice = live.http.post("/v1/completions", json=body).json()["choices"][0]
    scores = choice["logprobs"]
    offsets, whole = scores["text_offset"], choice["text"]
    assert whole.endswith(text) and len(offsets) == len(scores["tokens"])
    for (token, start), (_, end) in pairwise(zip(scores["tokens"], [*offsets, len(whole)], strict=False)):
        if not token.startswith("bytes:"):
            assert whole[start:end] == token, (start, end)
    assert offsets == sorted(offsets) and offsets[0] == 0
    assert 0 <= len(whole) - offsets[-1] <= max(1, len(scores["tokens"][-1]))
    streamed = [item["choices"][0]["logprobs"] for item in chunks(live, "/v1/completions", **body)]
    assert [at for item in streamed if item for at in item["text_offset"]] == offsets
