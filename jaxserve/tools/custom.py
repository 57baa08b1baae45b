"""Custom tools, whose input is any text: the model is told of functions with one text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxserve.tools.events import loaded

PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def as_function(name: str, description: Any, grammar: Mapping[str, Any]) -> dict[str, Any]:
    """Return the function that stands for a custom tool. grammar: `syntax` and `definition`, which nothing enforces."""
    parts = [description] if isinstance(description, str) else []
    if isinstance(grammar.get("definition"), str):
        parts.append(f"The input follows this {grammar.get('syntax')} grammar:\n{grammar['definition']}")
    return {"name": name, "description": "\n\n".join(parts), "parameters": PARAMETERS}


def arguments_of(text: str) -> str:
    """Return the arguments of the function for an input."""
    return json.dumps({"input": text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Return the input in the function's arguments; these as they are, where they are cut or of another form."""
    given = loaded(arguments)
    value = given.get("input", arguments) if isinstance(given, dict) else arguments
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
