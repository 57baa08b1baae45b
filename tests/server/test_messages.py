"""POST /v1/messages through Anthropic's client, on an engine double that repeats its prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.server import vendors

MODEL = "jaxserve-demo"
HI = [{"role": "user", "content": "Hi"}]
Fake = Callable[..., Any]


def events(live: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    made = live.http.post("/v1/messages", json={"messages": HI, "max_tokens": 3, "stream": True, **fields})
    return vendors.events_of(made, vendors.message_event(), unknown=("ping", "error"))


def test_create(plain: Any) -> None:
    made = plain.anthropic.messages.create(
        model=MODEL, max_tokens=5, system="Be brief.", messages=HI, service_tier="standard_only",
        extra_headers={"x-slo-tpot-ms": "70"}, extra_body={"temperature": 0.5, "top_k": 7, "ttft_slo_ms": 900},
    )  # fmt: skip
    vendors.message().validate_python(made.to_dict())
    prompt = plain.engine.submitted[-1].prompt
    assert made.content[0].text == plain.service.tokenizer.decode(prompt[:5], skip_special_tokens=True)
    assert (made.role, made.stop_reason, made.stop_sequence) == ("assistant", "max_tokens", None)
    assert (made.usage.input_tokens, made.usage.output_tokens) == (len(prompt), 5)
    slo, params = plain.engine.submitted[-1].slo, plain.engine.submitted[-1].params
    assert (slo.ttft, slo.tpot) == (0.9, 0.07), "as in chat"
    assert (params.max_tokens, params.temperature, params.top_k) == (5, 0.5, 7)
    assert plain.sent().index("Be brief.") < plain.sent().index("Hi")


def test_blocks_become_messages(plain: Any) -> None:
    plain.anthropic.messages.create(
        model=MODEL,
        max_tokens=1,
        system=[{"type": "text", "text": "Rules.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "One?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "Two."},
                ],
            },
            {"role": "user", "content": "Three?"},
            {"role": "assistant", "content": "The answer is"},
        ],
    )
    prompt = plain.sent()
    places = [prompt.index(text) for text in ("Rules.", "One?", "Two.", "Three?")]
    assert places == sorted(places) and prompt.endswith("The answer is"), "a begun answer is continued"


def test_keys(fake: Fake) -> None:
    import anthropic

    live = fake(config={"api_key": ("right",)})
    given: Any = {"model": MODEL, "max_tokens": 1, "messages": HI}
    with vendors.anthropic_of(live.url, "right") as right, vendors.anthropic_of(live.url, "wrong") as wrong:
        assert right.messages.create(**given).content
        with pytest.raises(anthropic.AuthenticationError) as error:
            wrong.messages.create(**given)
    assert error.value.body["error"]["type"] == "authentication_error"
    bearer = {"Authorization": "Bearer right"}
    body = {"max_tokens": 1, "messages": HI}
    assert live.http.post("/v1/messages", json=body, headers=bearer).status_code == 200


def test_failures(fake: Fake) -> None:
    import anthropic

    live = fake()
    live.engine.fail_after = 1
    last = events(live)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    with (
        pytest.raises(anthropic.APIStatusError),
        live.anthropic.messages.stream(model=MODEL, max_tokens=3, messages=HI) as stream,
    ):
        stream.get_final_message()
    live.engine.fail_after, live.engine.bound = None, 0
    with pytest.raises(anthropic.APIStatusError) as error:
        live.anthropic.messages.create(model=MODEL, max_tokens=1, messages=HI)
    assert error.value.body["type"] == "error"
    live.service.draining = True
    told = live.http.post("/v1/messages", json={"max_tokens": 1, "messages": HI})
    assert (told.status_code, told.json()["error"]["type"]) == (503, "overloaded_error")


TOOL = {"name": "add", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "c", "name": "f"}
REFUSALS: tuple[Any, ...] = (
    ("max_tokens", {"max_tokens": 0}, "max_tokens=0"),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}, "assistant or system"),
    ("messages[0].content", {"messages": [{"role": "user", "content": 3}]}, "blocks"),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
    ("messages[0]", {"messages": [3]}, "object"),
    ("messages", {"messages": []}, "at least one"),
    ("stop_sequences", {"stop_sequences": [""]}, "not empty"),
    ("thinking.type", {"thinking": {"type": "sometimes"}}, "adaptive"),
    ("output_config.format.type", {"output_config": {"format": {"type": "xml"}}}, "json_schema"),
    ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema", "schema": 3}}}, "object"),
    ("mcp_servers", {"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ("tools[0].type", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
    ("temperature", {"temperature": -1}, "temperature=-1"),
    ("tools[0].name", {"tools": [{**TOOL, "name": "a b"}]}, "a b"),
    ("tools[0].input_schema", {"tools": [{"name": "add"}]}, "input_schema"),
    ("tools[0].input_schema.type", {"tools": [{"name": "add", "input_schema": {"type": "array"}}]}, "array"),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}}, "sub"),
    ("tool_choice.type", {"tools": [TOOL], "tool_choice": {"type": "sometimes"}}, "sometimes"),
    ("tool_choice", {"tool_choice": {"type": "any"}}, "tools"),
    ("messages[0].content[0].input", {"messages": [{"role": "assistant", "content": [USE]}]}, "input"),
)


def test_refusals_name_the_field(plain: Any) -> None:
    for field, given, told in REFUSALS:
        made = plain.http.post("/v1/messages", json={"max_tokens": 1, "messages": HI, **given})
        answer = made.json()
        assert (made.status_code, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
        message = answer["error"]["message"]
        assert answer["error"]["param"] == field and told in message and "function." not in message


def test_other_refusals(plain: Any) -> None:
    http = plain.http
    old = http.post("/v1/messages", json={"max_tokens": 1, "messages": HI}, headers={"anthropic-version": "2023-01-01"})
    assert (old.status_code, old.json()["error"]["param"]) == (400, "anthropic-version")
    missing = http.post("/v1/messages", json={"messages": HI})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "max_tokens")
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        held = http.post("/v1/messages", json={"max_tokens": 1, "messages": HI, "thread": thread})
        told = held.json()["error"]
        assert (held.status_code, told["type"], told["param"]) == (400, "invalid_request_error", "thread")
        assert told["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    model = http.post("/v1/messages", json={"max_tokens": 1, "messages": HI, "model": "claude"})
    assert (model.status_code, model.json()["error"]["type"]) == (404, "not_found_error")
