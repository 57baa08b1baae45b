"""From StructuredOutputs to a grammar of llguidance."""

from __future__ import annotations

import json
import re
from math import inf, prod
from typing import Any

from llguidance import LLMatcher, StructTag, gbnf_to_lark

from jaxserve.errors import InvalidValue, short
from jaxserve.sched.api.structured_outputs import StructuredOutputs
from jaxserve.structured.bounds import DEFINITIONS

# Between the tokens of JSON: at most a space, or a new line with indentation. Some models write whitespace without
# end if they may.
WHITESPACE = r" ?|\n[ \t]{0,64}"

MAX_FORCED = 4096  # bytes of a constraint that may force tokens
# How often a text comes at least; JSON as `json.dumps` writes it.
REPEATED = re.compile(r'(?:\{|"min(?:Items|Contains)": )(\d+)')
ENDLESS = re.compile(r'"\$(?:dynamicRef|recursiveRef)"')
UNFORCED = '\n%llguidance {"no_forcing": true}\n'  # the last of several holds


def grammar_of(wanted: StructuredOutputs) -> str:
    """Return the grammar that `LLMatcher` compiles. Raises InvalidValue that names the field."""
    grammar = _grammar_of(wanted)
    if forces(wanted):
        return grammar
    if wanted.kind in ("json", "json_object", "regex"):
        inner = json.loads(grammar)["grammars"][0]
        grammar = inner["lark_grammar"] or f"start: %json {json.dumps(inner['json_schema'])}"
    return grammar + UNFORCED


def forces(wanted: StructuredOutputs) -> bool:
    """Return whether tokens that are the only ones allowed are found, so that drafts may use them.

    llguidance then reads all text that is the only one allowed, for each mask: 12 ms for 65,000 characters, 0.01 ms
    without. So that text has to be short.
    """
    kind = wanted.kind
    if wanted.size > MAX_FORCED or wanted.whitespace_pattern is not None:
        return False
    text, size = wanted.regex or "", float(wanted.size)
    if kind in ("json", "structural_tag"):
        schema = json.loads(getattr(wanted, kind))
        text = json.dumps(schema)
        size = inf if ENDLESS.search(text) else _expanded(schema, schema, {})
    repeated = prod(max(1, int(count)) for count in REPEATED.findall(text))
    return kind != "grammar" and repeated <= MAX_FORCED and size * repeated <= MAX_FORCED


def _expanded(node: Any, root: Any, known: dict[str, float]) -> float:
    """Return the characters of a schema with its references replaced by what they name; inf if they are endless.

    known: the sizes of references so far.
    """
    if isinstance(node, list):
        return sum(_expanded(child, root, known) for child in node)
    if not isinstance(node, dict):
        return len(str(node))
    size = 0.0
    for key, value in node.items():
        if key == "$ref" and isinstance(value, str):
            if value not in known:
                known[value] = inf  # until it is known: for one that leads to itself
                _, *path = value.split("/")
                folder = root.get(path[0]) if len(path) == 2 and path[0] in DEFINITIONS else None
                if isinstance(folder, dict) and path[1] in folder:
                    known[value] = _expanded(folder[path[1]], root, known)
            size += known[value]
        elif key not in DEFINITIONS:
            size += len(key) + _expanded(value, root, known)
    return size


def _grammar_of(wanted: StructuredOutputs) -> str:
    kind = wanted.kind
    if kind == "json":
        assert wanted.json is not None
        return _json(wanted.json, wanted)
    if kind == "json_object":
        return _json('{"type": "object"}', wanted)
    if kind == "regex":
        assert wanted.regex is not None
        return LLMatcher.grammar_from_regex(wanted.regex)
    if kind == "choice":
        # A terminal, because the parser allows only 2,000 alternatives of a rule.
        return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, wanted.choice))
    if kind == "grammar":
        assert wanted.grammar is not None
        return _grammar(wanted.grammar)
    assert wanted.structural_tag is not None
    return _structural_tag(json.loads(wanted.structural_tag), _options(wanted))


def _options(wanted: StructuredOutputs) -> dict[str, Any]:
    """Return the options with which llguidance compiles JSON schemas."""
    options: dict[str, Any] = {"lenient": wanted.lenient, "coerce_one_of": wanted.lenient}
    if wanted.disable_any_whitespace:
        return {**options, "whitespace_flexible": False}
    return {**options, "whitespace_pattern": wanted.whitespace_pattern or WHITESPACE}


def _json(schema: str, wanted: StructuredOutputs) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=_options(wanted))  # type: ignore[arg-type]
    except ValueError as error:
        raise InvalidValue(f"json is not a schema: {str(error)[:200]}", "json") from error


def _grammar(text: str) -> str:
    if "::=" not in text:
        return text
    try:
        return gbnf_to_lark.gbnf_to_lark(text)
    except Exception as error:  # its parser raises whatever it meets
        raise InvalidValue(f"grammar is not valid GBNF: {str(error)[:200]}", "grammar") from error


def _structural_tag(given: dict[str, Any], options: dict[str, Any]) -> str:
    """Return the grammar of a structural tag: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}."""
    if isinstance(given.get("format"), dict):
        raise InvalidValue(
            "structural_tag.format is not supported: give structures, with begin, schema and end, and triggers",
            "structural_tag",
        )
    structures, triggers = given.get("structures"), given.get("triggers")
    for name, value in (("structures", structures), ("triggers", triggers)):
        if not isinstance(value, list) or not value:
            raise InvalidValue(f"structural_tag.{name}={short(value)} must be a list with an entry", "structural_tag")
    assert isinstance(structures, list) and isinstance(triggers, list)
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise InvalidValue(
            f"structural_tag.triggers={short(triggers)} must be texts that are not empty", "structural_tag"
        )
    tags = [_tag(at, structure, triggers, options) for at, structure in enumerate(structures)]
    return StructTag.to_grammar(tags, assume_special=False)


def _tag(at: int, given: Any, triggers: list[str], options: dict[str, Any]) -> StructTag:
    where = f"structural_tag.structures[{at}]"
    if not isinstance(given, dict):
        raise InvalidValue(f"{where}={short(given)} must be an object with begin, schema and end", "structural_tag")
    begin, schema, end = given.get("begin"), given.get("schema", {}), given.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise InvalidValue(f"{where}: begin={short(begin)} and end={short(end)} must be texts", "structural_tag")
    if not isinstance(schema, dict):
        raise InvalidValue(f"{where}.schema={short(schema)} must be an object", "structural_tag")
    trigger = next((trigger_text for trigger_text in triggers if begin.startswith(trigger_text)), None)
    if trigger is None:
        raise InvalidValue(
            f"{where}.begin={short(begin)} must start with one of the triggers {short(triggers)}", "structural_tag"
        )
    return StructTag(trigger=trigger, begin=begin, grammar={**schema, "x-guidance": options}, end=end)
