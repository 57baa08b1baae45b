"""Items of the Responses API as messages of chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.errors import InvalidValue, short
from jaxserve.server.failures import wrong
from jaxserve.server.openai import warn_once
from jaxserve.server.responses.tools import HOSTED, SHELL, function_of
from jaxserve.server.translated import object_of, objects_in, text_of
from jaxserve.tools.custom import arguments_of

Message = dict[str, Any]

KINDS = "message, reasoning, and the calls and outputs of functions, custom tools and local_shell"
OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
ROLES = ("user", "assistant", "system", "developer")
PARTS = ("input_text", "output_text", "text", "refusal")


def messages_of_items(given: str | Sequence[Any], where: str = "input") -> list[Message]:
    """Return the messages of chat that a text or a list of items stands for.

    Reasoning and function calls belong to the message of the assistant that they stand beside. Raises
    InvalidValue that names the item.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    turns = _Turns()
    for item, here in objects_in(given, where):
        _add(turns, item, here)
    return turns.done()


class _Turns:
    """The messages so far. Items of one turn of the assistant are joined to one message."""

    def __init__(self) -> None:
        self.made: list[Message] = []
        self._open: Message | None = None  # the turn of the assistant that is not complete
        self._thoughts: list[str] = []  # of that turn

    def add(self, message: Message) -> None:
        self.done()
        self.made.append(message)

    def assistant(self) -> Message:
        """Return the message of the assistant's turn."""
        if self._open is None:
            self._open = {"role": "assistant", "content": ""}
        return self._open

    def say(self, content: Any) -> None:
        if self._open is not None and (self._open["content"] or "tool_calls" in self._open):
            self.done()
        self.assistant()["content"] = content

    def reason(self, text: str) -> None:
        """Add reasoning, which comes before what it leads to."""
        if self._open is not None and (self._open["content"] or "tool_calls" in self._open):
            self.done()
        if text:
            self.assistant()
            self._thoughts.append(text)

    def done(self) -> list[Message]:
        """End the assistant's turn, and return the messages."""
        if self._open is not None:
            if self._thoughts:
                self._open["reasoning_content"] = "".join(self._thoughts)
            self.made.append(self._open)
            self._open, self._thoughts = None, []
        return self.made


def _add(turns: _Turns, item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ROLES:
            raise wrong(f"{where}.role", role, f"must be one of {', '.join(ROLES)}")
        content = _content(item.get("content"), f"{where}.content")
        if role == "assistant":
            turns.say(content)
        else:
            turns.add({"role": role, "content": content})
    elif isinstance(kind, str) and kind in CALLS:
        name, arguments = CALLS[kind](item, where)
        call = {"id": _call_id(item, where), "type": "function", "function": {"name": name, "arguments": arguments}}
        turns.assistant().setdefault("tool_calls", []).append(call)
    elif kind in OUTPUTS:
        content = _content(item.get("output"), f"{where}.output")
        turns.add({"role": "tool", "tool_call_id": _call_id(item, where), "content": content})
    elif kind == "reasoning":
        turns.reason(_reasoning(item, where))
    elif isinstance(kind, str) and kind.startswith(HOSTED):
        warn_once(f"ignoring items of type {kind[:100]!r} in the history: only OpenAI has these tools")
    else:
        raise InvalidValue(f"{where} of type {short(kind)} is not supported: {KINDS} are", f"{where}.type")


def _call_id(item: dict[str, Any], where: str) -> str:
    return text_of(item, "id" if "call_id" not in item and "local_shell" in item["type"] else "call_id", where)


def _function(item: dict[str, Any], where: str) -> tuple[str, str]:
    return function_of(item, where), text_of(item, "arguments", where)


def _custom(item: dict[str, Any], where: str) -> tuple[str, str]:
    return function_of(item, where), arguments_of(text_of(item, "input", where))


def _shell(item: dict[str, Any], where: str) -> tuple[str, str]:
    action = object_of(item.get("action"), f"{where}.action")
    given = {name: action[name] for name in SHELL["parameters"]["properties"] if action.get(name) is not None}
    return SHELL["name"], json.dumps(given, ensure_ascii=False)


# The name and the arguments of the function that stands for a call.
CALLS: dict[str, Callable[[dict[str, Any], str], tuple[str, str]]] = {
    "function_call": _function,
    "custom_tool_call": _custom,
    "local_shell_call": _shell,
}


def _reasoning(item: dict[str, Any], where: str) -> str:
    """Return the text of a reasoning item; "" if the client has none, as after another server."""
    parts = item.get("content") or []
    if not isinstance(parts, list):
        raise wrong(f"{where}.content", parts, "must be a list of parts")
    return "".join(text_of(part, "text", here) for part, here in objects_in(parts, f"{where}.content"))


def _content(given: Any, where: str) -> str | list[dict[str, Any]]:
    """Return the content of a message of chat: a text, or text parts."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise wrong(where, given, "must be a text or a list of text parts")
    return [_part(part, here) for part, here in objects_in(given, where)]


def _part(part: dict[str, Any], where: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind not in PARTS:
        raise InvalidValue(f"{where} of type {short(kind)} is not supported: only text is", f"{where}.type")
    return {"type": "text", "text": text_of(part, "refusal" if kind == "refusal" else "text", where)}
