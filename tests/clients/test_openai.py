"""OpenAI's client: chat, streams, tools and `parse`, in threads and on a loop."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from tests.support.server.live import MODEL, Live
from tests.support.shapes import ASK, CITIES, NAMED, WEATHER, Trip, weather


@pytest.fixture(scope="module")
def client(live: Live) -> openai.OpenAI:
    return live.client


def test_a_stream_is_the_whole_answer(client: openai.OpenAI) -> None:
    given = {"model": MODEL, "messages": ASK, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**given)
    chunks = list(client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage and whole.usage.completion_tokens > 0


def test_parse(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Trip, max_tokens=100)
    assert isinstance(made.choices[0].message.parsed, Trip)


def test_the_stream_helper_parses(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASK, response_format=Trip, max_tokens=100) as stream:
        kinds = {event.type for event in stream}
        made = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(made.choices[0].message.parsed, Trip)


def test_a_class_as_a_tool(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Trip)]
    made = client.chat.completions.parse(
        model=MODEL, messages=ASK, tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=200
    )
    (call,) = made.choices[0].message.tool_calls
    assert call.function.name == "Trip" and isinstance(call.function.parsed_arguments, Trip)


def test_the_stream_helper_collects_calls(client: openai.OpenAI) -> None:
    given = {"tools": [WEATHER], "tool_choice": NAMED, "max_tokens": 80}
    with client.chat.completions.stream(model=MODEL, messages=ASK, **given) as stream:
        events = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        made = stream.get_final_completion().choices[0]
    (call,) = made.message.tool_calls
    assert made.finish_reason == "tool_calls"
    assert [event.arguments for event in events] == [call.function.arguments]
    assert json.loads(call.function.arguments)["city"] in CITIES


def test_a_loop_of_two_steps(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER], tool_choice=NAMED, max_tokens=80)
    message = first.choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": weather(**json.loads(call.function.arguments))}
    last = client.chat.completions.create(
        model=MODEL, messages=[*ASK, message, result], tools=[WEATHER], tool_choice="auto", max_tokens=8
    )
    assert last.usage.prompt_tokens > first.usage.prompt_tokens
    assert last.choices[0].message.content


def test_many_at_once_on_a_loop(base: str) -> None:
    async def work() -> list[str]:
        http = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, http_client=http) as client:

            async def one(seed: int) -> str:
                parts = []
                stream = await client.chat.completions.create(
                    model=MODEL, messages=ASK, seed=seed % 2, temperature=1.0, max_tokens=12, stream=True
                )
                async for chunk in stream:
                    parts.append(chunk.choices[0].delta.content or "")
                return "".join(parts)

            return await asyncio.gather(*(one(seed) for seed in range(8)))

    made = asyncio.run(work())
    assert made[0] and made[0::2] == [made[0]] * 4 and made[1::2] == [made[1]] * 4


def test_errors_are_of_their_class(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(model="other", messages=ASK)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=-1)
