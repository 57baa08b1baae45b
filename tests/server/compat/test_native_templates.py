"""Tool loops with templates of families that read tools in their own way: in our words, with their markers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from jaxserve.tools.families import Parsers
from tests.support.server.live import Live
from tests.support.server.templates import tokenizer_of

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
LISTED = '[{"name": "add", "arguments": {"a": "x"}}]'


class Family(NamedTuple):
    """A template, the parser that it asks for, a call as the family writes it, and what its prompts have."""

    parser: str
    template: str
    writes: str
    told: str  # the tools
    history: str  # the call and its result


EACH = "{% for m in messages %}"
END = "{% endfor %}"
ROLES = EACH + "<|start_of_role|>{{ m['role'] }}<|end_of_role|>{{ m['content'] }}\n" + END
OFFERED = "{% if tools %}<|start_of_role|>available_tools<|end_of_role|>{{ tools | tojson }}{% endif %}"
FAMILIES = {
    # Its template adds the token to a message of this role, and leaves all other roles out.
    "granite-3.0": Family(
        "granite",
        OFFERED + EACH + "{% if m['role'] == 'assistant_tool_call' %}<|start_of_role|>assistant<|end_of_role|>"
        "<|tool_call|>{{ m['content'] }}\n{% elif m['role'] in ('system', 'user', 'assistant', 'tool_response') %}"
        "<|start_of_role|>{{ m['role'] }}<|end_of_role|>{{ m['content'] }}\n{% endif %}" + END,
        "<|tool_call|>" + LISTED,
        '"name": "add"',
        f"assistant<|end_of_role|><|tool_call|>{LISTED}\n<|start_of_role|>tool_response<|end_of_role|>42\n",
    ),
    "granite-3.3": Family(
        "granite",
        OFFERED + ROLES,
        "<|tool_call|>" + LISTED,
        '"name": "add"',
        f"assistant<|end_of_role|><|tool_call|>{LISTED}\n<|start_of_role|>tool_response<|end_of_role|>42\n",
    ),
    "phi-4-mini": Family(
        "phi4_mini",
        "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
        "{% if 'tools' in message and message['tools'] is not none %}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}"
        "{% endif %}<|end|>{% endfor %}",
        f"<|tool_call|>{LISTED}<|/tool_call|>",
        '<|tool|>[{"name": "add"',
        f"<|assistant|><|tool_call|>{LISTED}<|/tool_call|><|end|><|tool_response|>42<|end|>",
    ),
    "phi-4-mini-vllm": Family(
        "phi4_mini_json",
        "{% if tools %}Write functools[...]: {{ tools | tojson }}{% endif %}" + EACH + "<|{{ m.role }}|>{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}" + END,
        "functools" + LISTED,
        '"name": "add"',
        '{"name": "add", "arguments": {"a": "x"}}<|tool|>42',
    ),
    "olmo-3": Family(
        "olmo3",
        "{% if tools %}<functions>{{ tools | tojson }}</functions>{% endif %}" + EACH + "<|{{ m.role }}|>"
        "{{ m.content or '' }}{% if m.tool_calls %}<function_calls>{% for c in m.tool_calls %}{{ c.function.name }}("
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{% endfor %}){% endfor %}"
        "</function_calls>{% endif %}" + END,
        '<function_calls>add(a="x")</function_calls>',
        '"name": "add"',
        '<function_calls>add(a="x")</function_calls><|tool|>42',
    ),
    "glm-4": Family(
        "glm4",
        "{% if tools %}## {{ tools | tojson }}{% endif %}" + EACH + "{% if m.role == 'observation' %}<|observation|>\n"
        "{{ m.content }}{% elif m.role in ('system', 'user', 'assistant') %}<|{{ m.role }}|>"
        "{{ m.get('metadata', '') }}\n{{ m.content }}{% endif %}" + END,
        'add\n{"a": "x"}',
        '"name": "add"',
        '<|assistant|>add\n{"a": "x"}<|observation|>\n42',
    ),
    "glm-4.5": Family(
        "glm45",
        "{% if tools %}{{ tools | tojson }}{% endif %}" + EACH + "<|{{ m.role }}|>{{ m.content or '' }}"
        "{% for c in m.tool_calls %}<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
        "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>{% endfor %}" + END,
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        '"name": "add"',
        "<tool_call>add<arg_key>a</arg_key><arg_value>x</arg_value></tool_call><|tool|>42",
    ),
    # It has no variable `tools`, and leaves `tool_calls` out.
    "smollm3": Family(
        "hermes",
        "{% if xml_tools is defined %}<tools>{{ xml_tools | tojson }}</tools> <tool_call></tool_call>{% endif %}"
        + EACH + "<|{{ m.role }}|>{{ m.content }}" + END,
        '<tool_call>{"name": "add", "arguments": {"a": "x"}}</tool_call>',
        '"name": "add"',
        '<tool_call>\n{"name": "add", "arguments": {"a": "x"}}\n</tool_call><|tool|>42',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tool_loop_in_the_own_form_of_a_family(writer: Callable[[str, str], Live], name: str) -> None:
    family = FAMILIES[name]
    assert Parsers.of("auto", "auto", family.template).tools == family.parser
    messages: list[Any] = [{"role": "user", "content": "What is it?"}]
    live = writer(family.template, family.writes)
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 400}
    choice = live.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert family.told in live.sent(), "the model is told of its tools"
    assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": "x"}
    messages += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "42"}]
    writer(family.template, "It is 42.")
    answer = live.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert answer["message"]["content"] == "It is 42." and answer["finish_reason"] == "stop"
    assert family.history in live.sent() and family.told in live.sent()
    writer(family.template, '[{"name":"add","arguments":{"a":"x"}}]')
    ask = {**body, "messages": messages[:1], "tool_choice": "required"}
    message = live.http.post("/v1/chat/completions", json=ask).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "add"
    assert live.engine.submitted[-1].params.constrained, "the grammar holds whatever the family"


@pytest.mark.parametrize("name", FAMILIES)
def test_words_beside_a_call_in_the_history_stay(name: str) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(FAMILIES[name].template)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": "x"}'}}
    text = tokenizer.chat([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ], tools=TOOLS, add_generation_prompt=False)  # fmt: skip
    assert "I add." in text and "42" in text and ('"x"' in text or "x</arg_value>" in text)
    assert family.told in text and "Be brief." in text
