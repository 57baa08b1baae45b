"""Tools of the Responses API as functions of chat, and calls of these as the items that its clients expect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.errors import InvalidValue, short
from jaxserve.server.failures import wrong
from jaxserve.server.openai import warn_once
from jaxserve.server.translated import object_of, objects_in, text_of
from jaxserve.tools.custom import as_function, input_of
from jaxserve.tools.definitions import MAX_TOOLS
from jaxserve.tools.events import loaded

# Run by OpenAI alone, some with a date: `web_search_preview_2025_03_11`. The model is not told of them.
HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "tool_search", "mcp")
SUPPORTED = "function, custom, namespace and local_shell"
SHELL: dict[str, Any] = {
    "name": "local_shell",
    "description": "Runs a command on the user's machine and returns its output.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
    },
}


class Tool(NamedTuple):
    """A tool of a request, and the function that the model is told of."""

    place: str  # in the body
    kind: str  # function, custom or local_shell
    name: str
    namespace: str | None
    function: dict[str, Any]


def tools_in(given: Sequence[Any] | None) -> dict[str, Tool]:
    """Return the tools of a request that can be called, by the names of their functions.

    Raises InvalidValue that names the field.
    """
    tools: dict[str, Tool] = {}
    for tool in _each(given or ()):
        if len(tools) == MAX_TOOLS:
            raise InvalidValue(f"tools has more than {MAX_TOOLS} tools", "tools")
        name = tool.function["name"]
        if name in tools:
            raise InvalidValue(f"tools: {short(name)} is defined twice", "tools")
        tools[name] = tool
    return tools


def _each(given: Sequence[Any]) -> Iterator[Tool]:
    for tool, place in objects_in(given, "tools"):
        if tool.get("type") != "namespace":
            yield from _tool(tool, place, None)
            continue
        namespace, inner = text_of(tool, "name", place), tool.get("tools")
        if not isinstance(inner, list):
            raise wrong(f"{place}.tools", inner, "must be a list of tools")
        for part, here in objects_in(inner, f"{place}.tools"):
            yield from _tool(part, here, namespace)


def _tool(tool: dict[str, Any], place: str, namespace: str | None) -> Iterator[Tool]:
    kind = tool.get("type")
    if kind == "local_shell":
        yield Tool(place, kind, kind, None, SHELL)
    elif kind in ("function", "custom"):
        name = text_of(tool, "name", place)
        function: dict[str, Any] = {"name": flat_name(namespace, name)}
        if kind == "function":
            fields = ("description", "parameters", "strict")
            function |= {field: tool[field] for field in fields if tool.get(field) is not None}
        else:
            form = object_of(tool.get("format") or {}, f"{place}.format")
            function = as_function(function["name"], tool.get("description"), form)
        yield Tool(place, kind, name, namespace, function)
    elif isinstance(kind, str) and kind.startswith(HOSTED):
        warn_once(f"ignoring tools of type {kind[:100]!r}: only OpenAI runs them")
    else:
        raise wrong(f"{place}.type", kind, f"is not supported: only tools of type {SUPPORTED} are")


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name of a function that stands for a tool of a namespace, as MCP clients write it."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def function_of(part: Mapping[str, Any], where: str) -> str:
    """Return the name of the function that stands for a tool. part: with its `name` and `namespace`, in the body."""
    namespace = None if part.get("namespace") is None else text_of(part, "namespace", where)
    return flat_name(namespace, text_of(part, "name", where))


def choice_of(given: Any, tools: Mapping[str, Tool]) -> Any:
    """Return the `tool_choice` of chat. Raises InvalidValue."""
    if not isinstance(given, dict):
        return given
    kind = given.get("type")
    if kind == "allowed_tools":
        chosen = given.get("tools")
        if not isinstance(chosen, list) or len(chosen) > MAX_TOOLS:
            what = f"tool_choice: the tools of allowed_tools={short(chosen)} must be a list of at most {MAX_TOOLS}"
            raise InvalidValue(what, "tool_choice")
        names = [name for choice in chosen for name in _chosen(choice, tools)]
        allowed = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": kind, "allowed_tools": {"mode": given.get("mode"), "tools": allowed}}
    if kind not in ("function", "custom", "local_shell"):
        what = f"tool_choice.type={short(kind)} is not supported: auto, none, required, a function, a custom tool and"
        raise InvalidValue(f"{what} allowed_tools are", "tool_choice")
    return {"type": "function", "function": {"name": _chosen(given, tools)[0]}}


def _chosen(given: Any, tools: Mapping[str, Tool]) -> list[str]:
    """Return the names of the functions of a tool in `tool_choice`; none of one that only OpenAI runs."""
    kind = object_of(given, "tool_choice.tools").get("type")
    if isinstance(kind, str) and kind.startswith(HOSTED):
        return []
    name = kind if kind == "local_shell" else text_of(given, "name", "tool_choice")
    if kind == "namespace":
        return [flat for flat, tool in tools.items() if tool.namespace == name]
    flat = name if kind == "local_shell" else function_of(given, "tool_choice")
    if flat not in tools:  # a tool of a namespace by its own name, if there is one only
        names = [qualified for qualified, tool in tools.items() if tool.name == name]
        flat = names[0] if len(names) == 1 else flat
    return [flat]


# calls


def new_call(tool: Tool | None, name: str, id: str) -> dict[str, Any]:
    """Return the item of a call before its arguments. tool: None: the model has invented the name."""
    if tool is None or tool.kind == "function":
        item = {"type": "function_call", "call_id": id, "name": tool.name if tool else name, "arguments": ""}
    elif tool.kind == "custom":
        item = {"type": "custom_tool_call", "call_id": id, "name": tool.name, "input": ""}
    else:
        return {"type": "local_shell_call", "call_id": id, "action": _action({})}
    return item | ({"namespace": tool.namespace} if tool and tool.namespace else {})


def arguments_read(kind: str, text: str) -> dict[str, Any]:
    """Return the fields of an item of type `kind` for the arguments that the model has written."""
    if kind == "function_call":
        return {"arguments": text}
    if kind == "custom_tool_call":
        return {"input": input_of(text)}
    given = loaded(text)
    return {"action": _action(given if isinstance(given, dict) else {})}


def _action(given: dict[str, Any]) -> dict[str, Any]:
    command = given.get("command")
    words = [command] if isinstance(command, str) else command if isinstance(command, list) else []
    more = {name: given[name] for name in ("working_directory", "timeout_ms") if given.get(name) is not None}
    return {"type": "exec", "command": [str(word) for word in words], "env": {}, **more}
