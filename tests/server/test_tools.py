"""Tools and thinking through OpenAI's client, with the demo model in front of a template that knows tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

import jaxserve.demo
from jaxserve.config import ServeConfig
from jaxserve.server.service import Service
from jaxserve.tokenizer import Tokenizer
from tests.support.server.live import SMALL, Live

MODEL = "jaxserve-demo"
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": CITY, "clock": EMPTY}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "clock"}},
]
ASK: list[Any] = [{"role": "user", "content": "Paris?"}]
# Short, because the demo model's context is. A model that thinks ends its prompt like this one with `thinking`.
TEMPLATE = """{% for m in messages %}{{ '<|user|>' if m.role in ('user', 'tool') else '<|assistant|>' }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %}
<|end|>{% endfor %}{% for t in tools or [] %}{{ t.function.name }} {% endfor %}<|assistant|>
{% if thinking %}<think>{% else %}{% if false %}</think>{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def templated(engine: Any) -> Iterator[Live]:
    tokenizer = Tokenizer.load(jaxserve.demo.model_path(), chat_template=TEMPLATE)
    made = Live(Service(engine, tokenizer, ServeConfig.load(mesh="2x1", **SMALL)))
    yield made
    made.stop()


def create(live: Live, **given: Any) -> Any:
    given = {"messages": ASK, "tools": TOOLS, "temperature": 1.0, "seed": 1, "max_tokens": 200, **given}
    return live.client.chat.completions.create(model=MODEL, **given)


def checked(calls: Any) -> list[tuple[str, Any]]:
    """Return the names and arguments of calls, which follow their schemas."""
    made = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
    for name, arguments in made:
        jsonschema.validate(arguments, SCHEMAS[name])
    assert len({call.id for call in calls}) == len(calls)
    return made


def test_required_calls_are_valid(templated: Live) -> None:
    for seed in range(3):
        choice = create(templated, tool_choice="required", parallel_tool_calls=False, seed=seed).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert len(checked(choice.message.tool_calls)) == 1
        (call,) = choice.message.tool_calls
        bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", call.function.arguments)
        assert not re.search(r"\s", bare), call.function.arguments


def test_a_stream_has_the_calls_and_logprobs_of_the_whole_answer(templated: Live) -> None:
    """That each call begins with its id and its name, once, is a law of tests/tools/test_parsers.py."""
    for wanted in ("required", {"type": "function", "function": {"name": "weather"}}):
        given = {"tool_choice": wanted, "parallel_tool_calls": False, "seed": 4, "n": 2, "logprobs": True}
        calls, scored, ends = [["", ""], ["", ""]], [list[str](), list[str]()], {}
        for chunk in create(templated, **given, stream=True):
            (one,) = chunk.choices
            ends[one.index] = one.finish_reason or ends.get(one.index)
            scored[one.index] += [entry.token for entry in one.logprobs.content] if one.logprobs else ()
            for part in one.delta.tool_calls or ():
                calls[one.index][0] += part.function.name or ""
                calls[one.index][1] += part.function.arguments
        for one in create(templated, **given).choices:
            (call,) = one.message.tool_calls
            assert checked([call]) and calls[one.index] == [call.function.name, call.function.arguments]
            assert ends[one.index] == one.finish_reason == "tool_calls"
            assert scored[one.index] == [entry.token for entry in one.logprobs.content]


def test_a_loop_of_two_steps(live: Live, templated: Live) -> None:
    """The calls and their results come back in the history, also where the template knows no tools."""
    for server, tools in ((templated, TOOLS), (live, TOOLS[1:])):
        named = {"type": "function", "function": {"name": tools[0]["function"]["name"]}}
        first = create(server, tools=tools, tool_choice=named, max_tokens=80).choices[0].message
        checked(first.tool_calls)
        results: list[Any] = [
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in first.tool_calls
        ]
        history = [*ASK, first.model_dump(exclude_none=True), *results]
        last = create(server, messages=history, tools=tools, tool_choice="none", max_tokens=8).choices[0]
        assert last.message.tool_calls is None and last.message.content
        assert last.finish_reason in ("stop", "length")


def counted(live: Live) -> dict[tuple[str, str], float]:
    """Return the requests that had, and those that attained, objectives of each phase."""
    series = r'slo_(requests|attained)_total\{[^}]*phase="(\w+)"[^}]*slo_class="custom"[^}]*\} (\S+)'
    return {(kind, phase): float(n) for kind, phase, n in re.findall(series, live.http.get("/metrics").text)}


def test_a_tool_loop_is_one_session_and_each_request_has_its_stages(templated: Live) -> None:
    """The second request finds the pages of the first; each is judged by the objectives of its own stages."""
    before = counted(templated)
    minute = {"tpot_slo_ms": 60_000}
    question = "Rain in Paris or Rome? " * 4
    asked = [{"role": "user", "content": question}]
    named = {"type": "function", "function": {"name": "weather"}}

    def turn(messages: list[Any], stages: dict[str, Any], **given: Any) -> Any:
        extra = {"session_id": "loop", "ttft_slo_ms": 60_000, "stage_slo": stages}
        return create(templated, messages=messages, extra_body=extra, **given)

    first = turn(asked, {"thinking": minute, "answer": minute}, tool_choice=named, max_tokens=80)
    (call,) = first.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    history = [*asked, first.choices[0].message.model_dump(exclude_none=True), result]
    hasty = {"thinking": minute, "answer": {"tpot_slo_ms": 0.001}}
    last = turn(history, hasty, tool_choice="none", max_tokens=8)
    assert last.choices[0].message.content
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert last.usage.prompt_tokens_details.cached_tokens >= len(question) // 8
    gained = {key: value - before.get(key, 0) for key, value in counted(templated).items()}
    assert [gained["requests", phase] for phase in ("ttft", "tpot", "all")] == [2, 2, 2]
    assert [gained["attained", phase] for phase in ("ttft", "tpot", "all")] == [2, 1, 1]  # the last answer was late
    assert templated.http.delete("/v1/sessions/loop").json()["deleted"] is True
