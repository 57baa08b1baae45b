"""OpenAI's client on the Responses API: answers, streams, conversations, tools and `parse`."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.support.server.live import MODEL, Live
from tests.support.shapes import CITIES, WEATHER, Trip, weather

TOOL: Any = {"type": "function", "strict": True, **WEATHER["function"]}
NAMED: Any = {"type": "function", "name": "weather"}


@pytest.fixture(scope="module")
def client(live: Live) -> openai.OpenAI:
    return live.client


def test_a_stream_is_the_whole_answer(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": MODEL, "input": "Paris?", "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**given)
    events = list(client.responses.create(**given, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens > 0
    with client.responses.stream(**given) as stream:
        last = list(stream)[-1]
    assert (last.type, last.response.output_text) == ("response.incomplete", whole.output_text)


def test_a_conversation(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="Paris?", max_output_tokens=8)
    second = client.responses.create(model=MODEL, input="Rome?", previous_response_id=first.id, max_output_tokens=8)
    assert second.usage.input_tokens > first.usage.total_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=first.id):
        client.responses.create(model=MODEL, input="And now?", previous_response_id=first.id)


def test_a_tool_and_its_result(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": MODEL, "tools": [TOOL]}
    first = client.responses.create(**given, input="Paris?", tool_choice=NAMED, max_output_tokens=80)
    (call,) = first.output
    arguments = json.loads(call.arguments)
    assert (call.type, call.name, first.status) == ("function_call", "weather", "completed")
    assert arguments["city"] in CITIES
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": weather(**arguments)}
    last = client.responses.create(**given, input=[result], previous_response_id=first.id, max_output_tokens=8)
    assert last.output_text and last.usage.input_tokens > first.usage.total_tokens


def test_calls_arrive_in_a_stream(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"tools": [TOOL], "tool_choice": NAMED, "max_output_tokens": 80}
    with client.responses.stream(model=MODEL, input="Paris?", **given) as stream:
        done = [event.arguments for event in stream if event.type == "response.function_call_arguments.done"]
        (call,) = stream.get_final_response().output
    assert done == [call.arguments]
    assert json.loads(call.arguments)["city"] in CITIES


def test_parse(client: openai.OpenAI) -> None:
    made = client.responses.parse(model=MODEL, input="Paris?", text_format=Trip, max_output_tokens=100)
    assert isinstance(made.output_parsed, Trip)
    with client.responses.stream(model=MODEL, input="Paris?", text_format=Trip, max_output_tokens=100) as stream:
        assert isinstance(stream.until_done().get_final_response().output_parsed, Trip)


def test_a_class_as_a_tool(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Trip)["function"]
    made = client.responses.parse(
        model=MODEL, input="Paris?", tools=[{"type": "function", **tool}], tool_choice="required",
        parallel_tool_calls=False, max_output_tokens=200,
    )  # fmt: skip
    (call,) = made.output
    assert call.name == "Trip" and Trip.model_validate(call.parsed_arguments).city in CITIES


def test_errors_are_of_their_class(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        client.responses.create(model="other", input="Paris?")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.responses.create(model=MODEL, input="Paris?", temperature=-1)
