"""Bounds on structured outputs, checked before llguidance sees them: it recurses once a rule."""

from __future__ import annotations

import json
import re
from typing import Any

from jaxserve.errors import InvalidValue, short
from jaxserve.sched.api.structured_outputs import StructuredOutputs

MAX_RULES = 1_000  # definitions of a schema, rules of a grammar
MAX_NODES = 20_000  # objects and lists of a schema
MAX_DEPTH = 100  # of objects and lists in each other
MAX_ALTERNATIVES = 10_000  # of a grammar
DEFINITIONS = ("$defs", "definitions")
RULE = re.compile(r"^[ \t]*[?!]?\w[^:\n\"/]*:", re.MULTILINE)


def check_bounds(wanted: StructuredOutputs) -> None:
    """Raise InvalidValue, naming what is wrong or too much, if JSON is none or a constraint exceeds a bound."""
    kind = wanted.kind
    if kind == "grammar":
        assert wanted.grammar is not None
        _check(kind, "rules", len(RULE.findall(wanted.grammar)), MAX_RULES)
        _check(kind, "alternatives", wanted.grammar.count("|"), MAX_ALTERNATIVES)
    elif kind in ("json", "structural_tag"):
        check_schema(kind, _object(kind, getattr(wanted, kind)))


def _object(kind: str, text: str) -> dict[str, Any]:
    """Return the object that a JSON text holds. Raises InvalidValue if it holds none."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{kind}={short(text)} is not valid JSON: {str(error)[:200]}", kind) from error
    if not isinstance(read, dict):
        raise InvalidValue(f"{kind}={short(text)} must be a JSON object, not {type(read).__name__}", kind)
    return read


def check_schema(kind: str, given: Any) -> None:
    """Raise InvalidValue, naming what is too much of it, if a schema, or JSON that holds some, exceeds a bound."""
    rules = nodes = 0
    level, depth = [given], 0
    while level:
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                rules += sum(len(node[name]) for name in DEFINITIONS if isinstance(node.get(name), dict))
                below += node.values()
            else:
                below += node
        level = [node for node in below if isinstance(node, dict | list)]
        nodes, depth = nodes + len(level), depth + 1
        _check(kind, "definitions", rules, MAX_RULES)
        _check(kind, "objects and lists", nodes, MAX_NODES)
        _check(kind, "levels", depth, MAX_DEPTH)


def _check(kind: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidValue(f"{kind} has {count} {what}: at most {most} are allowed", kind)
