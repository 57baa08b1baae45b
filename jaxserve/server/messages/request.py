"""The body of `POST /v1/messages`, and the chat request that it stands for."""

from __future__ import annotations

import json
import re
from typing import Any

from jaxserve.errors import InvalidValue, short
from jaxserve.server.failures import Refused, wrong
from jaxserve.server.messages.errors import NO_THREADS
from jaxserve.server.openai import ChatBody, Drawn, thinking_arguments, validated, warn_once
from jaxserve.server.translated import chunked, object_of, objects_in, shared_fields, text_of

NAMES = {  # of the fields of chat, in errors
    r"stop": "stop_sequences",
    r"response_format(\.json_schema)?": "output_config.format",
    r"reasoning_effort": "output_config.effort",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"tool_choice\.function": "tool_choice",
}
TIERS = {"auto": None, "standard_only": None}  # Anthropic's; others are tiers of the server's configuration
BILL = "x-anthropic-billing-header:"
# Run by Anthropic alone, as versions of a type: `web_search_20250305`.
HOSTED = re.compile(r"(web_search|web_fetch|code_execution|tool_search_tool_\w+?|advisor)_\d{8}")
HOSTED_BLOCKS = re.compile(r"server_tool_use|redacted_thinking|\w+_tool_result|container_upload")  # nor their results
FORMAT_NAME = "output"  # chat wants a name of each format

Message = dict[str, Any]


class CountBody(Drawn):
    """The body of `POST /v1/messages/count_tokens`."""

    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountBody):
    """The body of `POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None  # without effect
    container: Any = None
    mcp_servers: Any = None
    thread: Any = None


def chat_of(body: CountBody) -> ChatBody:
    """Return the chat request of a body. Raises InvalidValue or Refused that names a field of the body."""
    for name in ("container", "mcp_servers"):
        if getattr(body, name, None):
            raise InvalidValue(f"{name} is not supported by this server: leave it out", name)
    if getattr(body, "thread", None):
        # Ignoring it would drop the history: the next turn of a thread brings only the new messages.
        what = "thread is not supported by this server, which holds no conversation: send all its messages"
        raise Refused(400, what, "thread", NO_THREADS)
    messages = _messages(body)
    fields: dict[str, Any] = {**shared_fields(body), "model": body.model, "messages": messages}
    if body.service_tier in TIERS:
        fields["service_tier"] = TIERS[body.service_tier]
    if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    tools = [_tool(tool, where) for where, tool in own_tools(body).items()]
    more: dict[str, Any] = {
        "chat_template_kwargs": _template_arguments(body),
        "response_format": _format(body.output_config),
        "tools": tools or None,
        "tool_choice": _choice(body.tool_choice),
        "reasoning_effort": (body.output_config or {}).get("effort"),
    }
    if (body.tool_choice or {}).get("disable_parallel_tool_use"):
        more["parallel_tool_calls"] = False
    if isinstance(body, MessagesBody):
        more |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences, **chunked(body.stream)}
    fields |= {name: value for name, value in more.items() if value is not None}
    return validated(fields, ChatBody)


def _messages(body: CountBody) -> list[Message]:
    messages: list[Message] = []
    if body.system:
        messages.append({"role": "system", "content": _without_bill(_texts(body.system, "system"))})
    for message, where in objects_in(body.messages, "messages"):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise wrong(f"{where}.role", role, "must be user, assistant or system")
        if role == "system" and isinstance(content, list):
            messages.append({"role": role, "content": _texts(content, f"{where}.content")})
        elif isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif isinstance(content, list):
            blocks = list(objects_in(content, f"{where}.content"))
            messages += (_assistant if role == "assistant" else _user)(blocks)
        else:
            raise wrong(f"{where}.content", content, "must be a text or a list of blocks")
    return messages


def _without_bill(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return instructions without Claude Code's line that differs in each request, for which no prefix would fit."""
    if isinstance(content, str):
        return content
    return [part for part in content if not part["text"].startswith(BILL)]


def _texts(given: str | list[Any], where: str) -> str | list[dict[str, Any]]:
    """Return a text, or the text parts of a list of blocks."""
    if isinstance(given, str):
        return given
    return [_text_block(block, here) for block, here in objects_in(given, where)]


def _text_block(block: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a part of chat for a block that is a text, or that holds one."""
    kind, source = block.get("type"), block.get("source")
    if kind == "tool_reference":  # a result of Claude Code's search for tools; all tools are given
        return _part(f"The tool {text_of(block, 'tool_name', where)} can be called.")
    if kind == "search_result" and isinstance(block.get("content"), list):
        parts = list(objects_in(block["content"], f"{where}.content"))
        texts = [text_of(part, "text", here) for part, here in parts]
        return _part("\n".join([str(block.get("title") or ""), str(source or ""), *texts]))
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return _part(f"{block.get('title') or ''}\n{text_of(source, 'data', f'{where}.source')}".lstrip("\n"))
    if kind != "text":
        what = f"{where} of type {short(kind)} is not supported here: only text is"
        raise InvalidValue(what, f"{where}.type")
    return _part(text_of(block, "text", where))


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _user(blocks: list[tuple[dict[str, Any], str]]) -> list[Message]:
    """Return the messages of the user's blocks: one of each tool's result, then one of the text."""
    results, parts = [], []
    for block, here in blocks:
        if block.get("type") == "tool_result":
            content = block.get("content")
            if not isinstance(content, str | list | None):
                raise wrong(f"{here}.content", content, "must be a text or a list of text blocks")
            told = _texts(content or "", f"{here}.content")
            results.append({"role": "tool", "tool_call_id": text_of(block, "tool_use_id", here), "content": told})
        else:
            parts.append(_text_block(block, here))
    return [*results, *([{"role": "user", "content": parts}] if parts or not results else [])]


def _assistant(blocks: list[tuple[dict[str, Any], str]]) -> list[Message]:
    parts, calls, thoughts = [], [], []
    for block, here in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(text_of(block, "thinking", here))
        elif kind == "tool_use":
            arguments = json.dumps(object_of(block.get("input"), f"{here}.input"))
            function = {"name": text_of(block, "name", here), "arguments": arguments}
            calls.append({"id": text_of(block, "id", here), "type": "function", "function": function})
        elif isinstance(kind, str) and HOSTED_BLOCKS.fullmatch(kind):
            warn_once(f"ignoring blocks of type {kind[:100]!r} in the history: only Anthropic reads them")
        else:
            parts.append(_text_block(block, here))
    message: Message = {"role": "assistant", "content": parts}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return [message]


def _template_arguments(body: CountBody) -> dict[str, Any] | None:
    """Return the arguments of the chat template, with whether the model thinks."""
    if body.thinking is None:
        return body.chat_template_kwargs
    return {**thinking_arguments(body.thinking), **(body.chat_template_kwargs or {})}


def _format(config: dict[str, Any] | None) -> dict[str, Any] | None:
    given = (config or {}).get("format")
    if given is None:
        return None
    where = "output_config.format"
    if object_of(given, where).get("type") != "json_schema":
        raise wrong(f"{where}.type", given.get("type"), "must be json_schema")
    return {"type": "json_schema", "json_schema": {"name": FORMAT_NAME, "schema": given.get("schema"), "strict": True}}


def own_tools(body: CountBody) -> dict[str, Any]:
    """Return the tools of a body by their places in it, without those that only Anthropic runs."""
    names = {}
    for at, tool in enumerate(body.tools or ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and HOSTED.fullmatch(kind):
            warn_once(f"ignoring tools of type {kind[:100]!r}: only Anthropic runs them")
        else:
            names[f"tools[{at}]"] = tool
    return names


def _tool(given: Any, where: str) -> dict[str, Any]:
    tool = object_of(given, where)
    if tool.get("type") not in (None, "custom"):
        raise wrong(f"{where}.type", tool["type"], "is not supported: only custom tools are")
    function: dict[str, Any] = {"name": text_of(tool, "name", where)}
    function |= {"parameters": object_of(tool.get("input_schema"), f"{where}.input_schema")}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(given: dict[str, Any] | None) -> str | dict[str, Any] | None:
    if given is None:
        return None
    kind = given.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": text_of(given, "name", "tool_choice")}}
    choice = {"auto": "auto", "any": "required", "none": "none"}.get(kind) if isinstance(kind, str) else None
    if choice is None:
        raise wrong("tool_choice.type", kind, "must be auto, any, tool or none")
    return choice
