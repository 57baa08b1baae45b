"""The requests of agents that speak chat, recorded: texts shortened, personal details replaced.

The first request of each and the one after two calls. For Claude Code and Codex see their own files.
"""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.server.prompts import messages_of
from tests.support.server import templates
from tests.support.server.live import Live

STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    return {"type": "function", "function": {"name": name, "description": "Runs it.", "parameters": parameters}}


def turn(name: str, number: int, content: str | None, result: Any) -> list[dict[str, Any]]:
    """Return a call and its result."""
    function = {"name": name, "arguments": f'{{"command":"call {number}"}}'}
    call = {"id": f"call_e084eb398be472b5401e6b8{number}", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": result},
    ]


def texts(*given: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in given]


def said(*texts: Any) -> list[dict[str, Any]]:
    """Return messages: the system's, then the user's and the assistant's in turns."""
    roles = ("system", *("user", "assistant") * len(texts))
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


SHELL = "run_shell_command"
QWEN = said("You are an agent.", texts("This is the setup."), "Got it.", texts("Run it."))
AIDER = said(
    "Act as an expert.", "Change it.", "Ok, I will.", "New code.", "Ok.", "The files.", "Ok, those.", "Say hello."
)
PROMPT = said("You are an agent.", '"Run it."')
AGENTS: dict[str, dict[str, Any]] = {
    "qwen-code 0.15.10": {
        "messages": QWEN, "tools": [tool("tool_search"), tool(SHELL)], "max_tokens": 8000, **STREAM,
    },
    "qwen-code 0.15.10, later": {
        "messages": [*QWEN, *turn(SHELL, 0, None, texts("one")), *turn(SHELL, 1, None, texts("two"))],
        "tools": [tool("tool_search"), tool(SHELL)], "max_tokens": 8000, **STREAM,
    },
    "opencode 1.18.33, title": {
        "messages": [*said("You write titles.", "A title for this:\n"), {"role": "user", "content": '"Run it."'}],
        "max_tokens": 4000, **STREAM,
    },
    "opencode 1.18.33": {
        "messages": PROMPT, "tools": [tool("bash")], "tool_choice": "auto", "max_tokens": 4000, **STREAM,
    },
    "opencode 1.18.33, later": {
        "messages": [*PROMPT, *turn("bash", 0, "", "one\n"), *turn("bash", 1, "", "two\n")],
        "tools": [tool("bash")], "tool_choice": "auto", "max_tokens": 4000, **STREAM,
    },
    "continue 1.5.47": {"messages": PROMPT, "tools": [tool("Read"), tool("Bash")], **STREAM},
    "continue 1.5.47, later": {
        "messages": [*PROMPT, *turn("Bash", 0, "", "one\n"), *turn("Bash", 1, "", "two\n")],
        "tools": [tool("Read"), tool("Bash")], **STREAM,
    },
    "aider 0.86.2": {"messages": AIDER, "temperature": 0},
}  # fmt: skip
TEMPLATES = ("HEADERS", "DROPS", "FIRST", "HARMONY", "ALTERNATES", "NO_SYSTEM", "SHORT_IDS", "COUNTS", "ONE_CALL")


@pytest.mark.parametrize("agent", AGENTS)
def test_the_server_takes_it(plain: Live, agent: str) -> None:
    given = {**AGENTS[agent], "max_tokens": 2, "truncate_prompt_tokens": 200, "model": "jaxserve-demo"}
    answer = plain.http.post("/v1/chat/completions", json=given)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("agent", AGENTS)
def test_every_template_renders_it_in_order(agent: str, template: str) -> None:
    given = AGENTS[agent]
    messages = messages_of(given["messages"])
    prompt = templates.tokenizer_of(getattr(templates, template)).chat(messages, tools=given.get("tools"))
    shown = [message["content"] for message in messages if message["content"] and "tool_calls" not in message]
    if template == "SHORT_IDS":  # this one shows ids in place of results
        shown = [message["content"] for message in messages if message["role"] == "user"]
    at = 0
    for text in shown:
        at = prompt.index(text.strip(), at)
    for one in given.get("tools") or ():
        assert one["function"]["name"] in prompt
