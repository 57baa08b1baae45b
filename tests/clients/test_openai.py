"""OpenAI's client: helpers of streams, tools, conversations and errors, in threads and on a loop.

Whole answers and streams are compared through LangChain, which sends them by this client.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import openai
import pytest

from tests.support.server.live import MODEL, Live
from tests.support.shapes import ASK, CITIES, NAMED, WEATHER, Trip

TOOL: Any = {"type": "function", "strict": True, **WEATHER["function"]}  # of the Responses API


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


def test_a_conversation_of_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="Paris?", max_output_tokens=8)
    second = client.responses.create(model=MODEL, input="Rome?", previous_response_id=first.id, max_output_tokens=8)
    assert second.usage.input_tokens > first.usage.total_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=first.id):
        client.responses.create(model=MODEL, input="And now?", previous_response_id=first.id)


def test_calls_of_a_response_arrive_in_a_stream(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "weather"},
        "max_output_tokens": 80,
    }
    with client.responses.stream(model=MODEL, input="Paris?", **given) as stream:
        done = [event.arguments for event in stream if event.type == "response.function_call_arguments.done"]
        (call,) = stream.get_final_response().output
    assert done == [call.arguments]
    assert json.loads(call.arguments)["city"] in CITIES


def test_a_class_as_a_tool_of_a_response(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Trip)["function"]
    made = client.responses.parse(
        model=MODEL, input="Paris?", tools=[{"type": "function", **tool}], tool_choice="required",
        parallel_tool_calls=False, max_output_tokens=200,
    )  # fmt: skip
    (call,) = made.output
    assert call.name == "Trip" and Trip.model_validate(call.parsed_arguments).city in CITIES


def test_errors_are_of_their_class(client: openai.OpenAI) -> None:
    chat = partial(client.chat.completions.create, messages=ASK)
    for create in (chat, partial(client.responses.create, input="Paris?")):
        with pytest.raises(openai.NotFoundError, match="other"):
            create(model="other")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            create(model=MODEL, temperature=-1)
