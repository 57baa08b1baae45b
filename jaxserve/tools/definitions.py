"""The tools of a request and which of them may be called, checked and in one form."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidValue, short
from jaxserve.tools.custom import arguments_of, as_function
from jaxserve.tools.events import Schemas

MAX_TOOLS = 1024
KINDS = ("function", "custom")  # of tools, in OpenAI's field
MODES = ("none", "auto", "required")
TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_NAME = re.compile(r"[\w.:/\-]{1,256}")


@dataclass(frozen=True)
class Tools:
    """The tools that the model may call. mode: auto, required, or named with `name`."""

    definitions: tuple[dict[str, Any], ...]  # as in OpenAI's field
    mode: str
    name: str | None = None
    parallel: bool = True
    strict: bool = False
    custom: frozenset[str] = frozenset()  # names of those that take any text: functions here

    @property
    def schemas(self) -> Schemas:
        """The schema of the parameters of each tool."""
        return {
            definition["function"]["name"]: definition["function"].get("parameters") or {}
            for definition in self.definitions
        }


def tools_of(tools: Any, choice: Any = None, parallel: Any = None) -> Tools | None:
    """Return the tools that may be called; None if there are none. Raises InvalidValue that names the field."""
    tools = [] if tools is None else tools
    if not isinstance(tools, list):
        raise InvalidValue(f"tools={short(tools)} must be a list of tools", "tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidValue(f"tools has {len(tools)} entries: at most {MAX_TOOLS} are allowed", "tools")
    offered = tuple(_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in offered]
    choice, allowed = _allowed(choice, names)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidValue(f"tools: {short(twice)} is defined twice", "tools")
    offered = tuple(tool for tool in offered if tool["function"]["name"] in allowed)
    mode, name = _choice(choice, allowed)
    if not offered or mode == "none":
        return None
    strict = all(tool["function"].get("strict") for tool in offered if name in (None, tool["function"]["name"]))
    custom = frozenset(name for name, tool in zip(names, tools, strict=True) if tool.get("type") == "custom")
    return Tools(offered, mode, name, parallel is not False, strict, custom)


def _allowed(choice: Any, names: list[str]) -> tuple[Any, list[str]]:
    """Return the choice among the tools that `allowed_tools` names, or else among all, and their names."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return choice, names
    given = choice.get("allowed_tools")
    mode, tools = (given.get("mode"), given.get("tools")) if isinstance(given, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        wanted = f'{{"mode": "auto" or "required", "tools": [...]}} with at most {MAX_TOOLS} tools'
        raise InvalidValue(f"tool_choice.allowed_tools={short(given)} must be {wanted}", "tool_choice")
    chosen = {name for tool in tools for _, name in [_choice(tool, names)] if name is not None}
    return mode, [name for name in names if name in chosen]


def _choice(choice: Any, names: list[str]) -> tuple[str, str | None]:
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice not in MODES:
            allowed = f"{', '.join(MODES)}, or an object that names a function"
            raise InvalidValue(f"tool_choice={short(choice)} must be {allowed}", "tool_choice")
        if choice == "required" and not names:
            raise InvalidValue("tool_choice='required' needs tools", "tool_choice")
        return choice, None
    kind = choice.get("type") if isinstance(choice, dict) else None
    function = choice.get(kind) if kind in KINDS else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        wanted = '{"type": "function", "function": {"name": NAME}}'
        raise InvalidValue(f"tool_choice={short(choice)} must be {', '.join(MODES)} or {wanted}", "tool_choice")
    if name not in names:
        known = ", ".join(names)[:200] or "there are none"
        raise InvalidValue(f"tool_choice names {short(name)}, which is not among the tools: {known}", "tool_choice")
    return "named", name


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type", "function") if isinstance(tool, dict) else tool
    if kind not in KINDS:
        raise InvalidValue(f"{where}.type={short(kind)} is not supported: only {' and '.join(KINDS)} are", "tools")
    where, function = f"{where}.{kind}", tool.get(kind)
    if not isinstance(function, dict):
        raise InvalidValue(f"{where}={short(function)} must be an object with a name", where)
    name = function.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        what = "must be 1 to 256 letters, digits or any of _ . : / -"
        raise InvalidValue(f"{where}.name={short(name)} {what}", f"{where}.name")
    for key, of in (("description", str), ("strict", bool)):
        if function.get(key) is not None and not isinstance(function[key], of):
            allowed = "a text" if of is str else "true or false"
            raise InvalidValue(f"{where}.{key} must be {allowed}", f"{where}.{key}")
    if kind == "custom":
        return {
            "type": "function",
            "function": as_function(name, function.get("description"), _grammar(function, where)),
        }
    elif function.get("parameters") is not None:
        _check_schema(function["parameters"], f"{where}.parameters")
    kept = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": kept}


def _grammar(custom: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the grammar of a custom tool; empty if its input is any text. Raises InvalidValue."""
    form = custom.get("format") or {"type": "text"}
    grammar = form.get("grammar") if isinstance(form, dict) and form.get("type") == "grammar" else {}
    if not isinstance(form, dict) or form.get("type") not in ("text", "grammar") or not isinstance(grammar, dict):
        raise InvalidValue(f"{where}.format={short(form)} must be of type text or grammar", f"{where}.format")
    return grammar


def _check_schema(schema: Any, field: str) -> None:
    """Raise InvalidValue for parameters that are no schema of an object; the grammar checks the rest if it is used."""
    if not isinstance(schema, dict):
        raise InvalidValue(f"{field}={short(schema)} must be a JSON schema, which is an object", field)
    if schema.get("type", "object") != "object":
        raise InvalidValue(f"{field}.type={short(schema['type'])} must be 'object'", f"{field}.type")
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise InvalidValue(f"{field}.properties={short(properties)} must be an object", f"{field}.properties")
    for name, child in properties.items():
        where = f"{field}.properties.{name[:100]}"
        if not isinstance(child, dict | bool):
            raise InvalidValue(f"{where}={short(child)} must be a JSON schema", where)
        kinds = child.get("type", []) if isinstance(child, dict) else []
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if kind not in TYPES:
                raise InvalidValue(f"{where}.type={short(kind)} must be one of {', '.join(TYPES)}", f"{where}.type")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(child, str) for child in required):
        raise InvalidValue(f"{field}.required={short(required)} must be a list of names", f"{field}.required")


def calls_in_history(calls: Any, where: str) -> list[dict[str, Any]]:
    """Check the `tool_calls` of an earlier message. Raises InvalidValue that names the field."""
    if not isinstance(calls, list):
        raise InvalidValue(f"{where}={short(calls)} must be a list of calls", where)
    history = []
    for at, call in enumerate(calls):
        kind = "custom" if isinstance(call, dict) and call.get("type") == "custom" else "function"
        function = call.get(kind) if isinstance(call, dict) else None
        field = f"{where}[{at}].{kind}"
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidValue(f"{field}={short(function)} must have a name", field)
        field = f"{field}.{'input' if kind == 'custom' else 'arguments'}"
        given = function.get("input" if kind == "custom" else "arguments")
        if not isinstance(given, str if kind == "custom" else str | dict | None):
            raise InvalidValue(f"{field}={short(given)} must be a text", field)
        if kind == "custom":
            function = {"name": function["name"], "arguments": arguments_of(given)}
            history.append({"id": call.get("id"), "type": "function", "function": function})
            continue
        # Any text: a model's mistake, or a call that `max_tokens` has cut, comes back in the history.
        arguments = given if isinstance(given, str) and given else json.dumps(given or {})
        history.append({"type": "function", **call, "function": {**function, "arguments": arguments}})
    return history
