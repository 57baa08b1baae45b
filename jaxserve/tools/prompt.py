"""Conversations with tools, in the form that a chat template expects, or as text if it knows no tools."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.tools.events import loaded

Message = Mapping[str, Any]
PREAMBLE = """\
You may call these tools. Each line describes one, with the JSON schema of its parameters:
<tools>
{tools}
</tools>
To call a tool, answer with its name and arguments as one JSON object between tags, for each call:
<tool_call>
{{"name": "the name", "arguments": {{}}}}
</tool_call>"""


def knows_tools(template: str) -> bool:
    """Return whether a chat template renders tools."""
    return knows(template, "tools")


def knows(template: str, name: str) -> bool:
    """Return whether a chat template reads a variable."""
    return re.search(rf"\b{name}\b", template) is not None


def has_calls(messages: Sequence[Message]) -> bool:
    """Return whether a conversation has calls or their results."""
    return any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)


def with_objects(messages: Sequence[Message], wrapped: bool = False) -> list[dict[str, Any]]:
    """Return the messages with arguments as objects, as most templates expect them.

    wrapped: also those that are the text of no object, as where `max_tokens` has cut a call.
    """
    written = []
    for message in messages:
        copied = dict(message)
        if calls := copied.get("tool_calls"):
            copied["tool_calls"] = [{**call, "function": object_of(call["function"], wrapped)} for call in calls]
        written.append(copied)
    return written


def object_of(function: Mapping[str, Any], wrapped: bool = False) -> dict[str, Any]:
    """Return the function of a call with its arguments as an object, if they are the text of one."""
    given = function.get("arguments") or "{}"
    read = loaded(given) if isinstance(given, str) else given
    if not isinstance(read, dict):
        read = {"arguments": given} if wrapped else given
    return {**function, "arguments": read}


def demands_short_ids(template: str) -> bool:
    """Return whether a chat template refuses ids of calls that are not 9 letters and digits, as Mistral's do."""
    return re.search(r"length\s*!=\s*9\b", template) is not None


def with_short_ids(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with ids of 9 letters and digits; equal ids stay equal."""
    written = []
    for message in messages:
        copied = dict(message)
        if calls := copied.get("tool_calls"):
            copied["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in calls]
        if copied.get("role") == "tool":
            copied["tool_call_id"] = _short_id(copied.get("tool_call_id"))
        written.append(copied)
    return written


def _short_id(id: Any) -> str:
    given = str(id)
    return given if re.fullmatch("[A-Za-z0-9]{9}", given) else hashlib.sha256(given.encode()).hexdigest()[:9]


def _text(content: Any) -> Any:
    """Return the texts of a list of parts as one; anything else as it is."""
    if not isinstance(content, list):
        return content
    return "\n".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))


def as_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with tools, calls and results as text, for a template that knows none of them."""
    written: list[dict[str, Any]] = []
    if tools:
        described = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
        written.append({"role": "system", "content": PREAMBLE.format(tools=described)})
    results: list[str] = []  # those in a row, one message

    def end_results() -> None:
        if results:
            written.append({"role": "user", "content": "\n".join(results)})
            results.clear()

    for message in messages:
        plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        plain["content"] = _text(plain.get("content") or "")
        if message.get("role") == "tool":
            results.append(f"<tool_response>\n{plain['content']}\n</tool_response>")
            continue
        end_results()
        parts = [plain["content"]] if plain["content"] else []
        for call in message.get("tool_calls") or ():
            function = object_of(call["function"])
            text = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
            parts.append(f"<tool_call>\n{text}\n</tool_call>")
        if len(parts) > 1 or message.get("tool_calls"):
            plain["content"] = "\n".join(parts)
        if tools and message is messages[0] and plain["role"] == "system":
            written[0]["content"] = f"{plain['content']}\n\n{written[0]['content']}"
        else:
            written.append(plain)
    end_results()
    return written
