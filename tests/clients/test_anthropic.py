"""Anthropic's client on the Messages API: streams, the tool runner, a class as the format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.support.server.live import MODEL, Live
from tests.support.server.vendors import anthropic_of
from tests.support.shapes import ASK, Trip, weather

GIVEN: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 80}


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic_of(live.url, timeout=120) as made:
        yield made


def sizes(made: anthropic.types.Message) -> tuple[int, int]:
    """Return the tokens of the prompt, cached or not, and of the answer."""
    return made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0), made.usage.output_tokens


def test_the_tool_runner(client: anthropic.Anthropic) -> None:
    """The client's own loop calls the function and sends its result back, with all of the conversation."""
    called = []

    @anthropic.beta_tool
    def forecast(city: str) -> str:
        """Tell the weather of a city."""
        called.append(city)
        return weather("Paris")

    choice = {"type": "tool", "name": "forecast", "disable_parallel_tool_use": True}
    runner = client.beta.messages.tool_runner(
        model=MODEL, messages=ASK, tools=[forecast], tool_choice=choice, max_tokens=200, max_iterations=2,
        extra_body={"seed": 1},
    )  # fmt: skip
    first, second = runner
    assert first.stop_reason == "tool_use" and called
    assert sizes(second)[0] > sum(sizes(first))


def test_parse(client: anthropic.Anthropic) -> None:
    made = client.messages.parse(**GIVEN, output_format=Trip)
    assert isinstance(made.parsed_output, Trip)
