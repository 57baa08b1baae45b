"""The requests of Codex, recorded from version 0.171.0: texts shortened, personal details replaced.

Its sources have further tools, which depend on the model and on settings: they are added.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxserve.server import openai
from tests.support.server import vendors
from tests.support.server.peers import differs

CELL = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"], "additionalProperties": False}
EXEC = {"type": "function", "name": "exec_command", "description": "Runs it.", "strict": False, "parameters": CELL}
GRAMMAR = 'start: "--- Begin Patch" /.+/'
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}
SPAWN = {"type": "function", "name": "spawn_agent", "strict": False, "parameters": {"type": "object"}}
AGENTS = {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [SPAWN]}
FILES = {**AGENTS, "name": "mcp__files__", "tools": [{**SPAWN, "name": "list"}, {**PATCH, "name": "edit"}]}
SEARCH = {"type": "web_search", "external_web_access": False}
TOOLS: list[dict[str, Any]] = [EXEC, PATCH, SEARCH, AGENTS, FILES, {"type": "local_shell"}]
TEXT = "List the files."


ID = "019a0000-0000-7000-8000-000000000000"


def said(role: str, *texts: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "id": f"msg_{ID}", "role": role, "content": content}


FIRST: dict[str, Any] = {
    "model": "jaxserve-demo",
    "stream": True,
    "input": [
        said("developer", "You are a coding agent."),
        said("developer", "## Skills", "<permissions instructions>Ask before writing.</permissions instructions>"),
        said("user", "<environment_context><cwd>/work</cwd></environment_context>"),
        said("user", TEXT),
    ],
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": ID,
    "text": {"verbosity": "low"},
    "client_metadata": {"session_id": ID, "x-codex-turn-metadata": '{"installation_id":"0"}'},
}
SHELL_ACTION = {"type": "exec", "command": ["ls", "-a"], "env": {}, "timeout_ms": 1000, "working_directory": "/work"}
LATER: list[dict[str, Any]] = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAAA"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    {
        "type": "function_call", "status": "completed", "id": "fc_1", "name": "list", "namespace": "mcp__files__",
        "arguments": '{"cut": "', "call_id": "c1",
    },
    {"type": "custom_tool_call", "name": "apply_patch", "input": "--- Begin Patch", "call_id": "c2"},
    {"type": "local_shell_call", "call_id": "c3", "status": "completed", "action": SHELL_ACTION},
    {"type": "function_call_output", "id": f"fco_{ID}", "call_id": "c1", "output": "a.txt"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "patched"}]},
    {"type": "local_shell_call_output", "id": "c3", "output": "listed"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done so far."}]},
    said("user", "And now?"),
]  # fmt: skip


@differs(
    "OpenAI",
    "runs its built-in tools",
    "they are ignored, and the log says so once",
)
def test_the_first_request(roomy: Any, caplog: pytest.LogCaptureFixture) -> None:
    openai._warned.clear()
    for _ in range(2):
        given = {**FIRST, "max_output_tokens": 2}
        answer = roomy.http.post("/v1/responses", json=given, headers={"originator": "codex_exec"})
        found = vendors.events_of(answer, vendors.response_event())
        assert found[-1]["type"] == "response.incomplete" and found[-1]["response"]["tools"][3] == AGENTS
    prompt = roomy.sent()
    places = [prompt.index(text) for text in ("You are a coding agent.", "Ask before writing.", "/work</cwd>", TEXT)]
    assert places == sorted(places)
    for name in ("exec_command", "apply_patch", "multi_agent_v1__spawn_agent", "mcp__files__list", "mcp__files__edit"):
        assert f'"name": "{name}"' in prompt
    assert "web_search" not in prompt and "Begin Patch" in prompt, "the grammar is described"
    assert caplog.text.count("'web_search'") == 1


def test_a_later_request(roomy: Any) -> None:
    given = {**FIRST, "input": [*FIRST["input"], *LATER], "max_output_tokens": 1}
    assert roomy.http.post("/v1/responses", json=given).status_code == 200
    prompt = roomy.sent()
    calls = ['"mcp__files__list", "arguments": "{\\"cut\\": \\""', '{"input": "--- Begin Patch"}', '["ls", "-a"]']
    places = [prompt.rindex(text) for text in (TEXT, *calls, "a.txt", "patched", "listed", "Done so far.", "And now?")]
    assert places == sorted(places)


def call(live: Any, name: str, arguments: str, **more: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the item of a call that the engine double repeats from the prompt, and its events in a stream."""
    text = f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>DONE'
    given = {"input": text, "tools": TOOLS, "stop": ["DONE"], "max_output_tokens": 4000, "store": True, **more}
    whole = live.http.post("/v1/responses", json=given).json()
    vendors.response().validate_python(whole)
    found = vendors.events_of(live.http.post("/v1/responses", json={**given, "stream": True}), vendors.response_event())
    item, streamed = whole["output"][-1], found[-1]["response"]["output"][-1]
    names = ("id", "call_id")
    assert {k: v for k, v in item.items() if k not in names} == {k: v for k, v in streamed.items() if k not in names}
    output = {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "the result"}
    answer = live.http.post(
        "/v1/responses",
        json={"input": [output], "previous_response_id": whole["id"], "tools": TOOLS, "max_output_tokens": 1},
    )
    assert answer.status_code == 200, answer.text
    prompt = live.sent()
    assert prompt.rindex(f'"name": "{name}"') < prompt.rindex("the result")
    return item, [event for event in found if event.get("item_id") == streamed["id"]]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        (
            "exec_command", '{"cmd": "ls"}',
            {"type": "function_call", "name": "exec_command", "arguments": '{"cmd": "ls"}'},
        ),
        (
            "mcp__files__list", '{"a": 1}',
            {"type": "function_call", "name": "list", "namespace": "mcp__files__", "arguments": '{"a": 1}'},
        ),
        (
            "multi_agent_v1__spawn_agent", "{}",
            {"type": "function_call", "name": "spawn_agent", "namespace": "multi_agent_v1", "arguments": "{}"},
        ),
        (
            "apply_patch", '{"input": "--- Begin\\n\\u00e9"}',
            {"type": "custom_tool_call", "name": "apply_patch", "input": "--- Begin\né"},
        ),
        (
            "mcp__files__edit", '{"input": "x"}',
            {"type": "custom_tool_call", "name": "edit", "namespace": "mcp__files__", "input": "x"},
        ),
        (
            "local_shell", '{"command": ["ls", "-a"], "timeout_ms": 5}',
            {
                "type": "local_shell_call",
                "action": {"type": "exec", "command": ["ls", "-a"], "env": {}, "timeout_ms": 5},
            },
        ),
    ],
)  # fmt: skip
def test_calls_are_items_of_their_tools(roomy: Any, name: str, arguments: str, expected: dict[str, Any]) -> None:
    item, events = call(roomy, name, arguments)
    assert {key: item[key] for key in expected} == expected and ("namespace" in item) == ("namespace" in expected)
    kinds = {event["type"].removeprefix("response.") for event in events}
    assert ("function_call_arguments.done" in kinds) == (item["type"] == "function_call")
    assert ("custom_tool_call_input.done" in kinds) == (item["type"] == "custom_tool_call")


def allowed(*tools: dict[str, Any], mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


@pytest.mark.parametrize(
    ("choice", "offered"),
    [
        (allowed({"type": "function", "name": "exec_command"}), {"exec_command"}),
        (allowed({"type": "custom", "name": "apply_patch"}, SEARCH), {"apply_patch"}),
        (allowed({"type": "namespace", "name": "mcp__files__"}), {"mcp__files__list", "mcp__files__edit"}),
        (allowed({"type": "function", "name": "spawn_agent"}), {"multi_agent_v1__spawn_agent"}),
        (allowed({"type": "function", "name": "list", "namespace": "mcp__files__"}), {"mcp__files__list"}),
        (allowed(SEARCH), set()),
        ("none", set()),
    ],
)
def test_allowed_tools(roomy: Any, choice: Any, offered: set[str]) -> None:
    given = {**FIRST, "stream": False, "tool_choice": choice, "max_output_tokens": 1}
    answer = roomy.http.post("/v1/responses", json=given)
    assert answer.status_code == 200, answer.text
    lines = [line for line in roomy.sent().splitlines() if line.startswith('{"name": ') and '"the name"' not in line]
    assert {json.loads(line)["name"] for line in lines} == offered


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tool_choice": allowed({"type": "function", "name": "nothing"})}, "tool_choice"),
        ({"tool_choice": allowed(EXEC, mode="perhaps")}, "tool_choice"),
        ({"tool_choice": allowed(SEARCH, mode="required")}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [SEARCH, {**EXEC, "name": "a b"}]}, "tools[1].name"),
        ({"tools": [SEARCH, {**AGENTS, "tools": [SPAWN, {**EXEC, "parameters": 3}]}]}, "tools[1].tools[1].parameters"),
        ({"tools": [{**AGENTS, "tools": None}]}, "tools[0].tools"),
        ({"tools": [{**AGENTS, "tools": [{"type": "namespace", "name": "x"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [EXEC, EXEC]}, "tools"),
        ({"tools": [{**AGENTS, "tools": [{**SPAWN, "name": f"f{n}"} for n in range(1025)]}]}, "tools"),
        ({"tool_choice": allowed(*[EXEC] * 1025)}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": 3}}, "tool_choice"),
        ({"tools": [{"type": "computer_use_preview"}]}, "tools[0].type"),
        ({"input": [{"type": "custom_tool_call", "name": "x", "call_id": "c"}]}, "input[0].input"),
        ({"input": [{"type": "custom_tool_call", "name": "x", "input": "", "namespace": [1]}]}, "input[0].namespace"),
        ({"tool_choice": {"type": "function", "name": "x", "namespace": 1}}, "tool_choice.namespace"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_would_change_the_answer_is_refused(roomy: Any, given: dict[str, Any], field: str) -> None:
    answer = roomy.http.post("/v1/responses", json={**FIRST, **given})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


def test_the_tokens_of_an_input(roomy: Any) -> None:
    given = {**FIRST, "stream": False, "max_output_tokens": 1}
    counted = roomy.http.post("/v1/responses/input_tokens", json=given).json()
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": roomy.http.post("/v1/responses", json=given).json()["usage"]["input_tokens"],
    }


def test_allowed_tools_of_chat(roomy: Any) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("one", "two")]
    given = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "max_tokens": 1}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools[1:]}}
    assert roomy.http.post("/v1/chat/completions", json={**given, "tool_choice": choice}).status_code == 200
    assert '"two"' in roomy.sent() and '"one"' not in roomy.sent()
    wrong = roomy.http.post("/v1/chat/completions", json={**given, "tool_choice": {"type": "allowed_tools"}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tool_choice")
