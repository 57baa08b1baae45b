"""Requests of the suites of vLLM and llama.cpp, in our words, with the file that each is from."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.server.live import Live
from tests.support.server.peers import Case, Differs, missing

CHAT, TEXT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "What is the best book"}
SYSTEM = {"role": "system", "content": "Book"}
IDS = [5, 5, 5, 5, 5]
WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}}}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "Paris"}}
IMAGE = [{"type": "image_url", "image_url": {"url": "https://example.com/image.jpg"}}]


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), "max_tokens": 4, **more}


def text(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 4, **more}


def result(*content: Any, **more: Any) -> dict[str, Any]:
    """Return a conversation with a call, and content beside its result."""
    told = {"type": "tool_result", "tool_use_id": "t1", "content": "Sunny", **more}
    return chat(USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [*content, told]})


PARTS = [{"type": "text", "text": "What is"}, {"type": "text", "text": "the best book"}]
LLAMA_CHAT, LLAMA_TEXT = "llama.cpp test_chat_completion.py", "llama.cpp test_completion.py"
LLAMA_MESSAGES = "llama.cpp test_compat_anthropic.py"
VLLM_CHAT, VLLM_ERRORS, VLLM_TEXT = "vLLM test_chat.py", "vLLM test_chat_error.py", "vLLM test_completion.py"
USED = {"usage.completion_tokens": 4, "choices.0.finish_reason": "length", "choices.0.message.role": "assistant"}
MESSAGE = {
    "type": "message", "role": "assistant", "content.0.type": "text", "stop_reason": "max_tokens",
    "usage.output_tokens": 4, "usage.input_tokens": lambda count: count > 0, "usage.cache_read_input_tokens": 0,
}  # fmt: skip

CASES = [
    Case(LLAMA_CHAT, CHAT, chat(SYSTEM, USER), has={**USED, "id": lambda name: "cmpl" in name}),
    Case(LLAMA_CHAT, CHAT, chat(SYSTEM, {"role": "user", "content": PARTS}), has=USED),
    Case(LLAMA_CHAT, CHAT, chat(SYSTEM, USER, seed=42, temperature=0.8), has=USED),
    Case(LLAMA_CHAT, CHAT, chat(USER, logit_bias={"7": -100}), has=USED),
    Case(LLAMA_CHAT, CHAT, chat(USER, logprobs=True, top_logprobs=2), has={
        **USED, "choices.0.logprobs.content": lambda each: all(len(one["top_logprobs"]) == 2 for one in each)}),
    *(
        Case(LLAMA_CHAT, CHAT, {"messages": messages}, 400)
        for messages in (None, "text", [123], [{}], [{"role": 1}], [{"role": "system", "content": 123}], [SYSTEM, {}])
    ),
    Case(LLAMA_CHAT, CHAT, chat(USER, *[{"role": "assistant", "content": "x"}] * 2), differs=Differs(
        "llama.cpp", "two messages of the assistant at the end are an error", "they are rendered, as with OpenAI")),
    Case(LLAMA_CHAT, CHAT, chat(USER, {"role": "assistant", "content": "Whill"}), differs=Differs(
        "llama.cpp", "continues a last message of the assistant",
        "begins a new one unless `continue_final_message` is true, as vLLM")),
    Case(LLAMA_CHAT, CHAT, chat(USER, timings_per_token=True), has=USED, differs=Differs(
        "llama.cpp", "`timings` in each chunk", "the field is ignored; objectives have `usage.slo`")),
    *(
        Case(LLAMA_CHAT, CHAT, chat(USER, response_format=given), 400)
        for given in ({"type": "sound"}, {"type": "json_object", "schema": 123},
                      {"type": "json_object", "schema": {"type": 123}},
                      {"type": "json_object", "schema": {"type": "hiccup"}})
    ),
    Case(LLAMA_TEXT, TEXT, text("I believe"), has={"usage.completion_tokens": 4, "choices.0.finish_reason": "length"}),
    Case(LLAMA_TEXT, TEXT, text([IDS, IDS]), has={"choices": lambda each: len(each) == 2}),
    Case(LLAMA_TEXT, TEXT, text("I believe " * 500), 400),
    Case(LLAMA_TEXT, TEXT, text([IDS, "I believe"]), 400, differs=Differs(
        "llama.cpp", "a list may mix texts and lists of ids", "400: OpenAI's `prompt` is either")),
    Case(LLAMA_TEXT, TEXT, text([5, 6, "I believe", 7]), 400, differs=Differs(
        "llama.cpp", "a prompt may mix ids and texts", "400: OpenAI's `prompt` is either")),
    Case(LLAMA_MESSAGES, MESSAGES, chat(USER), has=MESSAGE),
    Case(LLAMA_MESSAGES, MESSAGES, chat(USER, system="Be kind."), has=MESSAGE),
    Case(LLAMA_MESSAGES, MESSAGES, chat(USER, system=[{"type": "text", "text": "Be kind."}]), has=MESSAGE),
    Case(LLAMA_MESSAGES, MESSAGES, chat({"role": "user", "content": PARTS}), has=MESSAGE),
    Case(LLAMA_MESSAGES, MESSAGES, chat(USER, {"role": "assistant", "content": "Hi!"}, USER), has=MESSAGE),
    Case(LLAMA_MESSAGES, MESSAGES, chat(USER, tools=[WEATHER], max_tokens=1), has={"stop_reason": "max_tokens"}),
    Case(LLAMA_MESSAGES, MESSAGES, chat(USER, temperature=0.5, top_p=0.9, top_k=40), has=MESSAGE),
    Case(LLAMA_MESSAGES, MESSAGES, chat(USER, stop_sequences=["zzz"]), has=MESSAGE),
    Case(LLAMA_MESSAGES, MESSAGES, chat(USER, metadata={"user_id": "me"}), has=MESSAGE),
    Case(LLAMA_MESSAGES, MESSAGES, result(), has=MESSAGE),
    Case(LLAMA_MESSAGES, MESSAGES, result({"type": "text", "text": "Here:"}), has=MESSAGE),
    Case(LLAMA_MESSAGES, MESSAGES, result(is_error=True), has=MESSAGE),
    Case(LLAMA_MESSAGES, MESSAGES, result(content=[{"type": "text", "text": "Sunny"}] * 2), has=MESSAGE),
    Case(LLAMA_MESSAGES, MESSAGES, result(content=[]), has=MESSAGE),
    Case(LLAMA_MESSAGES, MESSAGES, chat(), 400, differs=Differs(
        "llama.cpp", "takes an empty list of messages", "400, as with Anthropic")),
    Case(LLAMA_MESSAGES, MESSAGES, chat({"role": "user", "content": [{"type": "image", "source": {}}]}), 400),
    Case(LLAMA_MESSAGES, MESSAGES, chat(USER, thinking={"type": "enabled", "budget_tokens": 50}), has=MESSAGE),
    Case(LLAMA_MESSAGES, MESSAGES, {"max_tokens": 4}, 400, has={"type": "error"}),
    Case(LLAMA_MESSAGES, COUNT, {"messages": [USER]}, has={"input_tokens": lambda count: count > 0}),
    Case(LLAMA_MESSAGES, COUNT, {"messages": [USER], "system": "Hi"}, has={"input_tokens": lambda count: count > 9}),
    Case(LLAMA_MESSAGES, COUNT, {}, 400, has={"error.type": "invalid_request_error"}),
    Case(VLLM_ERRORS, CHAT, chat({"role": "system", "content": PARTS}, USER), has=USED),
    Case(VLLM_ERRORS, CHAT, chat({"role": "system", "content": IMAGE}, USER), 400, differs=Differs(
        "vLLM", "warns of an image in a system message", "400: no model here sees images")),
    Case(VLLM_ERRORS, CHAT, chat({"role": "user", "content": IMAGE}), 400, differs=Differs(
        "vLLM", "takes images where the model does", "400: no model here sees images")),
    Case(VLLM_ERRORS, CHAT, chat(USER, response_format={"type": "json_schema"}), 400),
    Case(VLLM_CHAT, CHAT, chat(USER), has={"choices.0.logprobs": None}),
    Case(VLLM_CHAT, CHAT, chat(USER, logprobs=True, top_logprobs=0), has={
        "choices.0.logprobs.content": lambda each: all(one["top_logprobs"] == [] for one in each)}),
    Case(VLLM_CHAT, CHAT, chat(USER, logprobs=True, top_logprobs=21), 400, has={"error.param": "top_logprobs"}),
    Case(VLLM_CHAT, CHAT, chat(USER, top_logprobs=2), 400),
    Case(VLLM_CHAT, CHAT, chat(USER, prompt_logprobs=1, stream=True), differs=Differs(
        "vLLM", "refuses `prompt_logprobs` with `stream`", "they come with the first chunk")),
    Case(VLLM_CHAT, CHAT, chat(USER, max_completion_tokens=3), has={"usage.completion_tokens": 3}),
    Case(VLLM_CHAT, CHAT, chat(USER, stop="zzz", include_stop_str_in_output=True), has=USED),
    Case(VLLM_CHAT, CHAT, chat(USER, stream_options={}), 400, has={"error.param": "stream_options"}),
    Case(VLLM_CHAT, CHAT, chat(USER, tools=[], tool_choice="required"), 400),
    Case(VLLM_CHAT, CHAT, chat(USER, tool_choice=None, tools=None), has=USED),
    Case(VLLM_CHAT, CHAT, chat(USER, guided_choice=["a", "b"], guided_regex="c"), 400),
    Case(VLLM_TEXT, TEXT, text(IDS), has={"choices.0.logprobs": None, "usage.total_tokens": 9}),
    Case(VLLM_TEXT, TEXT, text(IDS, logprobs=0), has={
        "choices.0.logprobs.top_logprobs": lambda each: all(len(one) == 1 for one in each)}),
    Case(VLLM_TEXT, TEXT, text(IDS, logprobs=2), has={
        "choices.0.logprobs.top_logprobs": lambda each: all(2 <= len(one) <= 3 for one in each)}),
    Case(VLLM_TEXT, TEXT, text(IDS, logprobs=21), 400, has={"error.param": "logprobs"}),
    Case(VLLM_TEXT, TEXT, text(IDS, logprobs=30, stream=True), 400, has={"error.param": "logprobs"}),
    Case(VLLM_TEXT, TEXT, text(["A robot", "My name"], prompt_logprobs=-1), 400),
    *(
        Case(VLLM_TEXT, TEXT, text(["A robot", "My name"], prompt_logprobs=top), has={
            "choices": lambda each: all(len(one["prompt_logprobs"]) > 1 for one in each)})
        for top in (0, 1)
    ),
    Case(VLLM_TEXT, TEXT, text(IDS, n=3), has={"choices": lambda each: [one["index"] for one in each] == [0, 1, 2]}),
    Case(VLLM_TEXT, TEXT, text(IDS, stream_options={"include_usage": None}), 400),
    Case(VLLM_TEXT, TEXT, text([]), 400),
    Case(VLLM_TEXT, TEXT, text([5, 10**9]), 400),
    Case(VLLM_TEXT, TEXT, text(list(range(20, 28)), truncate_prompt_tokens=4), has={"usage.prompt_tokens": 4}),
    Case(VLLM_TEXT, TEXT, text(IDS, truncate_prompt_tokens=4, truncation_side="right"), 400, differs=Differs(
        "vLLM", "`truncation_side: right` keeps the beginning of a prompt", "400: only the end is kept")),
    Case(VLLM_TEXT, TEXT, text(IDS, return_token_ids=True), 400, differs=Differs(
        "vLLM", "`return_token_ids` answers with the ids", "400: log-probabilities and `/tokenize` have them")),
    Case(VLLM_TEXT, TEXT, text(IDS, max_tokens=0, echo=True), has={"choices.0.text": lambda text: text}),
    Case(VLLM_TEXT, TEXT, text(IDS, suffix="x"), 400),
    Case(VLLM_TEXT, TEXT, text(IDS, best_of=2, n=1), 400),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.suite}-{str(case.body)[:60]}")
def test_a_request_of_a_peer(plain: Live, case: Case) -> None:
    answer = plain.http.post(case.path, json=case.body)
    assert answer.status_code == case.status, answer.text
    if case.status == 200 and case.body.get("stream"):
        assert "data: [DONE]" in answer.text and "prompt_logprobs" in answer.text
        return
    assert missing(answer.json(), case.has) == [], answer.text
