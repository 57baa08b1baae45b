"""Tools of requests: what is refused, what a grammar enforces, and what a template sees."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

import jaxserve.demo
from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from jaxserve.server.openai import ChatBody
from jaxserve.settings.fields import HttpSettings
from jaxserve.settings.other_engines import flag_hint
from jaxserve.tokenizer import Tokenizer
from jaxserve.tools.definitions import calls_in_history, tools_of
from jaxserve.tools.families import REASONING_PARSERS, TOOL_PARSERS, Parsers
from jaxserve.tools.forced import named_schema, required_schema
from jaxserve.tools.prompt import as_text, with_objects


def tool(**function):
    return {"type": "function", "function": function}


def named(name):
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ({"name": "f"}, None, "tools"),
        ([{"type": "web_search"}], None, "tools"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([tool()], None, "tools[0].function.name"),
        ([tool(name="")], None, "tools[0].function.name"),
        ([tool(name="f"), tool(name="a b")], None, "tools[1].function.name"),
        ([tool(name="f"), tool(name="f")], None, "tools"),
        ([tool(name="f", description=3)], None, "tools[0].function.description"),
        ([tool(name="f", parameters="x")], None, "tools[0].function.parameters"),
        ([tool(name="f", parameters={"type": "string"})], None, "tools[0].function.parameters.type"),
        ([tool(name="f", parameters={"properties": []})], None, "tools[0].function.parameters.properties"),
        ([tool(name="f", parameters={"properties": {"a": 1}})], None, "tools[0].function.parameters.properties.a"),
        ([tool(name="f", parameters={"properties": {"a": {"type": "text"}}})], None,
         "tools[0].function.parameters.properties.a.type"),
        ([tool(name="f", parameters={"required": "a"})], None, "tools[0].function.parameters.required"),
        ([tool(name="f")], "always", "tool_choice"),
        ([tool(name="f")], named("g"), "tool_choice"),
        ([tool(name="f")], {"type": "function"}, "tool_choice"),
        ([], "required", "tool_choice"),
        (None, named("g"), "tool_choice"),
    ],
    ids=str,
)  # fmt: skip
def test_refused(tools, choice, field):
    with pytest.raises(InvalidValue) as caught:
        tools_of(tools, choice)
    assert caught.value.param == field


def test_tools_that_may_not_be_called_are_none():
    assert tools_of(None) is None and tools_of([], "auto") is None and tools_of([tool(name="f")], "none") is None


def test_history_is_checked():
    kept = calls_in_history([{"id": "1", "function": {"name": "f", "arguments": '{"a":1}'}}], "x")
    assert kept == [{"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"a":1}'}}]
    assert calls_in_history([{"function": {"name": "f", "arguments": ""}}], "x")[0]["function"]["arguments"] == "{}"
    assert calls_in_history([{"function": {"name": "f", "arguments": "{a"}}], "x")[0]["function"]["arguments"] == "{a"
    for wrong, field in (
        ("f", "x"),
        ([{}], "x[0].function"),
        ([{"function": {"name": "f", "arguments": [1]}}], "x[0].function.arguments"),
    ):
        with pytest.raises(InvalidValue) as caught:
            calls_in_history(wrong, "x")
        assert caught.value.param == field


TREE = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "properties": {"tree": {"$ref": "#/$defs/node"}},
    "required": ["tree"],
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "integer"}}}},
}


def test_the_schema_of_required_calls():
    """References of a tool's schema hold inside of the schema of all calls."""
    schemas = {"walk": TREE, "stop": {}}
    several = required_schema(schemas, parallel=True)
    one = required_schema(schemas, parallel=False)
    walk = {"name": "walk", "arguments": {"tree": {"v": 1, "next": {"v": 2}}}}
    stop = {"name": "stop", "arguments": {}}
    jsonschema.validate([walk, stop], several)
    jsonschema.validate([walk], one)
    wrong = {"name": "walk", "arguments": {"tree": {"next": {"v": "x"}}}}
    other = {"name": "run", "arguments": {}}
    for value, schema in (([wrong], several), ([], several), ([other], several), ([walk, stop], one)):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"a": 1}, named_schema({}))


def test_templates_without_tools_get_text():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    talk = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
        {"role": "tool", "tool_call_id": "2", "content": "8"},
    ]
    made = as_text(talk, [tool(name="f")])
    assert [one["role"] for one in made] == ["system", "user", "assistant", "user"]
    assert made[0]["content"].startswith("Be kind.\n\n") and json.dumps({"name": "f"}) in made[0]["content"]
    written = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert made[2]["content"] == f"{written}\n{written}"
    assert made[3]["content"].count("<tool_response>") == 2
    assert with_objects(talk)[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert call["function"]["arguments"] == '{"a": 1}'


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages }}", "hermes", None),
        ("{% if tools %}<tool_call>{% endif %}</think>", "hermes", "qwen3"),
        ("{% if tools %}<tool_call><function=x>{% endif %}", "qwen3_coder", None),
        ("{{ tools }}<|start_header_id|><|python_tag|>", "llama3_json", None),
        ("{{ tools }}<|header_start|>", "pythonic", None),
        ("{{ tools }}[TOOL_CALLS][/THINK]", "mistral", "mistral"),
        ("<｜tool▁calls▁begin｜>{{ message['tool_calls'] }}</think>", "deepseek_v3", "qwen3"),
        ("{{ tools }}<minimax:tool_call></think>", "minimax_m2", "qwen3"),
        ("{{ tools }}<|channel|>analysis<|call|>", "gpt_oss", "gpt_oss"),
    ],
)
def test_parsers_are_chosen_by_the_template(template, tools, reasoning):
    assert Parsers.of("auto", "auto", template) == (tools, reasoning)
    assert Parsers.of("none", "none", template) == (None, None)


def test_flags_name_all_parsers():
    fields = HttpSettings.__dataclass_fields__
    for name, known in (("tool_call_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
        assert all(one in str(fields[name].metadata) for one in known)


def test_reasoning_effort_reaches_the_template():
    def arguments(**given):
        return ChatBody(messages=[], **given).template_arguments

    assert arguments(reasoning_effort="low") == {"reasoning_effort": "low"}
    assert arguments(reasoning_effort="none")["enable_thinking"] is False
    kept = arguments(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert kept["enable_thinking"] is True
    with pytest.raises(InvalidValue, match="reasoning_effort='much'"):
        arguments(reasoning_effort="much")


# Chat templates, through transformers.

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


def test_parsers_are_checked_before_a_model_is_loaded() -> None:
    for field in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(InvalidValue, match=f"{field}='x' must be auto, none") as caught:
            ServeConfig.load(**{field: "x"})
        assert caught.value.param == field
    assert "--tool-call-parser" in str(flag_hint("--enable-auto-tool-choice"))
