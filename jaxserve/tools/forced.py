"""Calls that a grammar enforces: the same JSON for every family, so that arguments can be passed on as they arrive."""

from __future__ import annotations

from typing import Any

from jaxserve.tools.events import Event, Schemas
from jaxserve.tools.pattern import character, many
from jaxserve.tools.streamed import CallStream, Forms, json_form

CALLS = Forms(json_form(many(character(lambda char: char.isspace() or char in "[,")), arguments=("arguments",)))


def required_schema(schemas: Schemas, parallel: bool) -> dict[str, Any]:
    """Return the schema of a list of at least one call: [{"name": ..., "arguments": {...}}]."""
    names = list(schemas)
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/tool-{at}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for at, name in enumerate(names)
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls} if len(calls) > 1 else calls[0]}
    if not parallel:
        schema["maxItems"] = 1
    defs = {f"tool-{at}": _moved(named_schema(schemas[name]), f"#/$defs/tool-{at}") for at, name in enumerate(names)}
    return {**schema, "$defs": defs}


def named_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the arguments of one call."""
    schema = {key: value for key, value in parameters.items() if key not in ("$schema", "$id")}
    if "properties" not in schema and not any(key in schema for key in ("$ref", "anyOf", "oneOf", "allOf", "enum")):
        schema.setdefault("additionalProperties", False)  # OpenAI: no parameters are an empty list of them
    return schema if "$ref" in schema else {"type": "object", **schema}


def _moved(schema: Any, root: str) -> Any:
    """Return a schema whose references within itself begin at `root`."""
    if isinstance(schema, list):
        return [_moved(child, root) for child in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, root)
        for key, value in schema.items()
    }


class Required(CallStream):
    """Reads a list of calls, and passes on arguments as they arrive."""

    def __init__(self) -> None:
        super().__init__(CALLS)

    def finish(self) -> list[Event]:
        return []  # what is left is a call that was cut before its name


class Named:
    """Reads the arguments of the one call that the request names."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str) -> list[Event]:
        text = text.lstrip() if self._name is not None else text
        if not text:
            return []
        events = [Event("arguments", text)]
        if self._name is not None:
            events.insert(0, Event("call", self._name))
            self._name = None
        return events

    def finish(self) -> list[Event]:
        return []
