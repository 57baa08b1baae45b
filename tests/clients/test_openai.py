"""OpenAI's client: helpers of streams, tools, conversations and errors, in threads and on a loop.

Whole answers and streams are compared through LangChain, which sends them by this client.
"""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from tests.support.server.live import MODEL, Live
from tests.support.shapes import ASK, CITIES, NAMED, WEATHER, Trip


@pytest.fixture(scope="module")
def client(live: Live) -> openai.OpenAI:
    return live.client


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


def test_a_class_as_a_tool_of_a_response(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Trip)["function"]
    made = client.responses.parse(
        model=MODEL, input="Paris?", tools=[{"type": "function", **tool}], tool_choice="required",
        parallel_tool_calls=False, max_output_tokens=200,
    )  # fmt: skip
    (call,) = made.output
    assert call.name == "Trip" and Trip.model_validate(call.parsed_arguments).city in CITIES
