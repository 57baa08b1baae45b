"""The requests of Claude Code, recorded from version 2.1.197: texts shortened, personal details replaced.

Blocks of tool search and of tools that Anthropic runs are added, as public captures have them.
"""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.server import openai
from tests.support.server.peers import differs

HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "x-app": "cli",
    "user-agent": "claude-cli/2.1.197 (external, cli)",
}
CACHED = {"cache_control": {"type": "ephemeral"}}
BASH = {
    "name": "Bash",
    "description": "Runs a command.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "command": {"description": "The command.", "type": "string"},
            "timeout": {"description": "Milliseconds.", "type": "number"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}
LATER = {"name": "mcp__files__list", "description": "Lists.", "input_schema": {"type": "object"}, "defer_loading": True}
FIRST: dict[str, Any] = {
    "model": "jaxserve-demo",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"},
                {"type": "text", "text": "List the files.", **CACHED},
            ],
        },
        {"role": "system", "content": "The tools of MCP servers are deferred."},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=sdk-cli; cch=0a1b2;"},
        {"type": "text", "text": "You are an agent for the command line.", **CACHED},
        {"type": "text", "text": "Be brief.", **CACHED},
    ],
    "tools": [
        BASH,
        {**LATER, "eager_input_streaming": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    ],
    "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"1"}'},
    "max_tokens": 8,  # recorded: 32000
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "betas": ["claude-code-20250219"],
    "stream": True,
}
TURNS = [
    *FIRST["messages"],
    {"role": "assistant",
     "content": [{"type": "thinking", "thinking": "I look for a tool.", "signature": "c2lnbmVk"},
                 {"type": "redacted_thinking", "data": "eA=="},
                 {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
                 {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
                 {"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {"query": "list"}, **CACHED}]},
    {"role": "user",
     "content": [{"type": "tool_result", "tool_use_id": "toolu_1",
                  "content": [{"type": "tool_reference", "tool_name": "mcp__files__list"}]},
                 {"type": "text", "text": "Go on."}]},
    {"role": "assistant",
     "content": [{"type": "tool_use", "id": "call_2", "name": "Bash", "input": {"command": "ls"}}]},
    {"role": "user",
     "content": [{"tool_use_id": "call_2", "type": "tool_result", "content": "a.txt", "is_error": False, **CACHED}]},
    {"role": "system", "content": [{"type": "text", "text": "The user opened a.txt.", **CACHED}]},
]  # fmt: skip


@differs(
    "Anthropic",
    "runs its server tools",
    "they are ignored, and the log says so once",
)
def test_the_first_request(roomy: Any, caplog: pytest.LogCaptureFixture) -> None:
    openai._warned.clear()
    for _ in range(2):
        answer = roomy.http.post("/v1/messages?beta=true", json=FIRST, headers=HEADERS)
        assert answer.status_code == 200 and "event: message_stop" in answer.text, answer.text
    prompt = roomy.sent()
    said = ["You are an agent", "Be brief.", "Today is Monday.", "List the files.", "The tools of MCP servers"]
    places = [prompt.index(text) for text in said]
    assert places == sorted(places)
    assert '"Bash"' in prompt and '"mcp__files__list"' in prompt
    assert "billing" not in prompt and "web_search" not in prompt
    assert caplog.text.count("'web_search_20250305'") == 1 and caplog.text.count("'context_management'") == 1


def test_a_later_request(roomy: Any) -> None:
    answer = roomy.http.post("/v1/messages?beta=true", json={**FIRST, "messages": TURNS}, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    prompt = roomy.sent()
    said = [
        "List the files.",
        "ToolSearch",
        "mcp__files__list can be called",
        "Go on.",
        '{"command": "ls"}',
        "a.txt\n",
        "The user opened a.txt.",
    ]
    places = [prompt.rindex(text) for text in said]
    assert places == sorted(places)
    counted = roomy.http.post("/v1/messages/count_tokens", json={**FIRST, "messages": TURNS}, headers=HEADERS)
    assert counted.json()["input_tokens"] == len(roomy.engine.submitted[-1].prompt)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"messages": [{"role": "ctx", "content": "x"}]}, "messages[0].role"),
    ],
)
def test_what_would_change_the_answer_is_refused(roomy: Any, given: dict[str, Any], field: str) -> None:
    answer = roomy.http.post("/v1/messages", json={**FIRST, **given}, headers=HEADERS)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


RAIN = {"type": "text", "media_type": "text/plain", "data": "Rain."}
DOCUMENT = {"type": "document", "source": RAIN, "title": "News"}
PASSAGE = {"type": "text", "text": "B"}
FOUND = {"type": "search_result", "source": "https://a.example", "title": "A", "content": [PASSAGE]}


@pytest.mark.parametrize(
    ("block", "text"),
    [(DOCUMENT, "News\nRain."), ({**DOCUMENT, "title": None}, "Rain."), (FOUND, "A\nhttps://a.example\nB")],
)
def test_blocks_that_hold_texts(plain: Any, block: dict[str, Any], text: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    for content in ([block], [result]):
        given = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        answer = plain.http.post("/v1/messages", json=given)
        assert answer.status_code == 200 and text in plain.sent(), answer.text


def test_other_documents_are_refused(plain: Any) -> None:
    block = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "eA=="}}
    given = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 1}
    answer = plain.http.post("/v1/messages", json=given)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content[0].type")
