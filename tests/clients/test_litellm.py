"""LiteLLM, as `openai/` and as `hosted_vllm/`."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from jaxserve.errors import QueueFull
from tests.support.server.live import MODEL, Live
from tests.support.shapes import ASK, CITIES, NAMED, WEATHER, Trip, weather

# `hosted_vllm` takes `additionalProperties` out of schemas, so the demo model writes more of them until it is cut.
OPENING = re.compile(r'\{\s*"city"\s*:\s*"(Paris|Rome)"')


@pytest.fixture(params=["openai", "hosted_vllm"])
def given(request: pytest.FixtureRequest, base: str) -> dict[str, Any]:
    return {"model": f"{request.param}/{MODEL}", "api_base": base, "api_key": "none", "num_retries": 0}


def test_completion_and_stream(given: dict[str, Any]) -> None:
    import litellm

    asked = {**given, "messages": ASK, "max_tokens": 12, "temperature": 0}
    whole = litellm.completion(**asked).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]
    assert whole and "".join(parts) == whole


def test_tools(given: dict[str, Any]) -> None:
    import litellm

    asked = {**given, "messages": ASK, "tools": [WEATHER], "max_tokens": 80, "temperature": 0}
    first = litellm.completion(**asked, tool_choice=NAMED)
    message = first.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "weather"
    if given["model"].startswith("hosted_vllm"):
        assert OPENING.match(call.function.arguments)
        return
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in CITIES
    history = [*ASK, message, {"role": "tool", "tool_call_id": call.id, "content": weather(**arguments)}]
    last = litellm.completion(**{**asked, "messages": history, "max_tokens": 8})
    assert last.usage.prompt_tokens > first.usage.prompt_tokens


def test_calls_arrive_in_a_stream(given: dict[str, Any]) -> None:
    import litellm

    asked = {**given, "messages": ASK, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 200}
    chunks = list(litellm.completion(**asked, parallel_tool_calls=False, stream=True))
    (call,) = litellm.stream_chunk_builder(chunks, messages=ASK).choices[0].message.tool_calls
    assert OPENING.match(call.function.arguments)


def test_a_class_as_the_format(given: dict[str, Any]) -> None:
    import litellm

    made = litellm.completion(**given, messages=ASK, response_format=Trip, max_tokens=100)
    assert Trip.model_validate_json(made.choices[0].message.content).city in CITIES


def test_a_context_overflow_has_its_own_error(given: dict[str, Any]) -> None:
    """By which LiteLLM falls back to a model with a longer context."""
    import litellm

    long = [{"role": "user", "content": "def main( " * 3000}]
    for stream in (False, True):
        with pytest.raises(litellm.ContextWindowExceededError, match="maximum context length"):
            list(litellm.completion(**given, messages=long, max_tokens=5, stream=stream))


def test_errors_are_of_their_class(given: dict[str, Any]) -> None:
    import litellm

    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**given, messages=ASK, temperature=-1)


@pytest.mark.parametrize("retries", [0, 1])
def test_a_full_queue_passes(base: str, live: Live, retries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """529 of /v1/messages is an error by which LiteLLM's router falls back, or it comes again if it may."""
    import litellm

    told, submit = list[Exception](), live.service.engine.submit

    def submitted(*given: Any) -> int:
        if not told:
            told.append(QueueFull("1 request waits", 0.1))
            raise told[0]
        return submit(*given)

    monkeypatch.setattr(live.service.engine, "submit", submitted)
    asked = {"model": f"anthropic/{MODEL}", "api_base": live.url, "api_key": "none", "num_retries": retries}
    if retries:
        answer = litellm.completion(**asked, messages=ASK, max_tokens=5)
        assert answer.usage.completion_tokens > 0
    else:
        with pytest.raises(litellm.InternalServerError, match="1 request waits"):
            litellm.completion(**asked, messages=ASK, max_tokens=5)
    assert told


def test_responses(given: dict[str, Any]) -> None:
    """`openai/` calls /v1/responses; `hosted_vllm/` may translate to chat."""
    import litellm

    asked = {**given, "input": "Paris?", "max_output_tokens": 12, "temperature": 0}
    whole = litellm.responses(**asked)
    events = list(litellm.responses(**asked, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text != ""


def test_messages(given: dict[str, Any]) -> None:
    """Anthropic's shape, which LiteLLM translates to what each provider speaks."""
    import asyncio

    import litellm

    made = asyncio.run(litellm.anthropic.messages.acreate(**given, messages=ASK, max_tokens=12))
    assert made["role"] == "assistant" and made["usage"]["output_tokens"] > 0
