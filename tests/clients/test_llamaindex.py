"""LlamaIndex's `OpenAILike`: chat, streams, structured outputs and tools."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.server.live import MODEL
from tests.support.shapes import CITIES, Trip, weather


@pytest.fixture(scope="module")
def llm(base: str) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=MODEL, api_base=base, api_key="none", is_chat_model=True, is_function_calling_model=True, strict=True,
        temperature=0, max_tokens=150, max_retries=0, context_window=1024,
    )  # fmt: skip


def test_chat_and_stream(llm: Any) -> None:
    from llama_index.core.llms import ChatMessage

    asked = [ChatMessage(role="user", content="Paris?")]
    whole = llm.chat(asked, max_tokens=12).message.content
    parts = [part.delta or "" for part in llm.stream_chat(asked, max_tokens=12)]
    assert whole and "".join(parts) == whole


def test_text(llm: Any, base: str) -> None:
    from llama_index.llms.openai_like import OpenAILike

    plain = OpenAILike(model=MODEL, api_base=base, api_key="none", is_chat_model=False, temperature=0, max_tokens=12)
    whole = plain.complete("def main(").text
    assert whole and "".join(part.delta or "" for part in plain.stream_complete("def main(")) == whole


def test_structured(llm: Any) -> None:
    made = llm.as_structured_llm(Trip).complete("Paris?")
    assert isinstance(made.raw, Trip)


def test_structured_by_schema(base: str) -> None:
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=MODEL, api_base=base, api_key="none", is_chat_model=True, should_use_structured_outputs=True,
        temperature=0, max_tokens=150, max_retries=0,
    )  # fmt: skip
    assert isinstance(llm.as_structured_llm(Trip).complete("Paris?").raw, Trip)


def test_tools(llm: Any) -> None:
    """The coldest demo model would indent the call as far as the grammar allows, so this one is warm."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool

    warm = llm.model_copy(update={"temperature": 1.0, "max_tokens": 300, "additional_kwargs": {"seed": 1}})
    tool = FunctionTool.from_defaults(weather)
    made = warm.chat_with_tools([tool], user_msg="Paris?", tool_required=True, allow_parallel_tool_calls=False)
    (call,) = warm.get_tool_calls_from_response(made)
    assert call.tool_name == "weather" and call.tool_kwargs["city"] in CITIES
    result = ChatMessage(
        role="tool", content=str(tool(**call.tool_kwargs)), additional_kwargs={"tool_call_id": call.tool_id}
    )
    history = [ChatMessage(role="user", content="Paris?"), made.message, result]
    last = warm.chat_with_tools([tool], chat_history=history)
    assert last.raw.usage.prompt_tokens > made.raw.usage.prompt_tokens
