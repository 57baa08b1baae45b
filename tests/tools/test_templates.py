"""Chat templates with and without tools, through transformers."""

from __future__ import annotations

from typing import Any

import pytest

import jaxserve.demo
from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from jaxserve.settings.other_engines import flag_hint
from jaxserve.tokenizer import Tokenizer

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Go"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "7"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "Does it."}}]
EACH = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
END = "{% endfor %}{{ m.content or '' }}{% endfor %}{{ tools[0].function.name }}"


def render(template: str | None, **given: Any) -> str:
    return Tokenizer.load(jaxserve.demo.model_path(), chat_template=template).chat(TALK, **given)


def test_a_template_gets_tools_and_arguments_as_it_reads_them() -> None:
    assert render(EACH + "{{ c.function.arguments.a }}" + END, tools=TOOLS) == "Go17f"
    joined = EACH + "{{ '<' + c.function.arguments + '>' }}" + END  # as DeepSeek's, which joins texts
    assert render(joined, tools=TOOLS) == 'Go<{"a": 1}>7f'


def test_a_template_without_tools_gets_text() -> None:
    text = render(None, tools=TOOLS)
    assert '{"name": "f", "description": "Does it."}' in text
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "<tool_response>\n7\n</tool_response>" in text
    assert "<tools>" not in render(None)  # the history alone


def test_parsers_are_checked_before_a_model_is_loaded() -> None:
    for field in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(InvalidValue, match=f"{field}='x' must be auto, none") as caught:
            ServeConfig.load(**{field: "x"})
        assert caught.value.param == field
    assert "--tool-call-parser" in str(flag_hint("--enable-auto-tool-choice"))
