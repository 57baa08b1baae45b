"""LangChain's `ChatOpenAI`: answers, streams, tools, structured outputs and an agent."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.support.server.live import MODEL
from tests.support.shapes import CITIES, Trip, weather


@pytest.fixture(scope="module")
def chat(base: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=base, api_key="none", model=MODEL, temperature=0, max_tokens=120, max_retries=0)


def test_invoke_and_stream(chat: Any) -> None:
    short = chat.bind(max_tokens=12)
    whole = short.invoke("Paris?")
    parts = list(short.stream("Paris?"))
    assert whole.content and "".join(part.content for part in parts) == whole.content
    assert len(parts) > 4 and whole.usage_metadata["output_tokens"] > 0


def test_batch(chat: Any) -> None:
    short = chat.bind(max_tokens=6)
    made = short.batch(["Paris?", "Rome?", "Paris?"])
    assert made[0].content == made[2].content == short.invoke("Paris?").content


def test_bound_tools_are_called(chat: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    made = tool(weather)
    first = chat.bind_tools([made], tool_choice="weather", strict=True).invoke("Paris?")
    (call,) = first.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in CITIES
    result = made.invoke(call)
    assert isinstance(result, ToolMessage)
    last = chat.bind_tools([made]).bind(max_tokens=8).invoke([HumanMessage("Paris?"), first, result])
    assert last.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


def test_calls_arrive_in_a_stream(chat: Any) -> None:
    bound = chat.bind_tools([Trip], tool_choice="any", parallel_tool_calls=False)
    whole = None
    for part in bound.stream("Paris?"):
        whole = part if whole is None else whole + part
    (call,) = whole.tool_calls
    assert call["name"] == "Trip" and Trip(**call["args"]).city in CITIES


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: Any, method: str) -> None:
    assert isinstance(chat.with_structured_output(Trip, method=method).invoke("Paris?"), Trip)


def test_json_mode(chat: Any) -> None:
    """`json_mode` promises any JSON object, and the demo model may write one without end."""
    asking = chat.with_structured_output(None, method="json_mode")
    try:
        assert isinstance(asking.invoke("Paris? JSON."), dict)
    except openai.LengthFinishReasonError as cut:
        assert cut.completion.choices[0].message.content.startswith("{")


def test_an_agent_of_two_steps(chat: Any) -> None:
    from langchain.agents import create_agent
    from langchain.agents.middleware import wrap_model_call

    @wrap_model_call
    def forced(request: Any, handler: Any) -> Any:
        """Demand the tool in the first step, because the demo model would not choose it."""
        first = len(request.messages) == 1
        settings = {"strict": True} if first else {"max_tokens": 8}
        return handler(request.override(tool_choice="weather" if first else "auto", model_settings=settings))

    agent = create_agent(chat, [weather], middleware=[forced], system_prompt="You tell the weather.")
    messages = agent.invoke({"messages": [{"role": "user", "content": "Paris?"}]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    _, first, result, last = messages
    assert result.content == weather(**first.tool_calls[0]["args"])
    assert last.content and last.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


def test_the_responses_api(chat: Any, base: str) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    made = ChatOpenAI(
        base_url=base, api_key="none", model=MODEL, temperature=0, max_tokens=120, max_retries=0, use_responses_api=True
    )
    short = made.bind(max_completion_tokens=12)  # `max_tokens` would lose to that of the constructor
    whole = short.invoke("Paris?")
    assert whole.text == chat.bind(max_tokens=12).invoke("Paris?").text != ""
    assert "".join(part.text for part in short.stream("Paris?")) == whole.text
    (call,) = made.bind_tools([tool(weather)], tool_choice="weather", strict=True).invoke("Paris?").tool_calls
    assert call["args"]["city"] in CITIES
    assert isinstance(made.with_structured_output(Trip, method="json_schema").invoke("Paris?"), Trip)
