"""Structured outputs of requests: OpenAI's `response_format` and vLLM's fields."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import msgspec

from jaxserve.errors import InvalidValue
from jaxserve.sched.api.structured_outputs import StructuredOutputs
from jaxserve.server.failures import wrong
from jaxserve.server.openai import Sampled, warn_once
from jaxserve.structured.bounds import check_schema
from jaxserve.structured.compiler import PATIENCE, Compiler, late
from jaxserve.tools.definitions import Tools
from jaxserve.tools.forced import named_schema, required_schema

FORMATS = ("text", "json_object", "json_schema", "structural_tag")
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "json_schema": "json",
    "ebnf": "grammar",
    "grammar": "grammar",
}


class Wanted(NamedTuple):
    """A constraint, and the field of the request that it comes from."""

    outputs: StructuredOutputs
    field: str


def structured_of(body: Sampled) -> Wanted | None:
    """Return the constraint of a request, if it has one. Raises InvalidValue that names the field."""
    form = _of_format(body.response_format)
    constraints = [] if form is None else [form]
    if body.structured_outputs is not None:
        constraints.append(Wanted(StructuredOutputs.of(_written(body.structured_outputs)), "structured_outputs"))
    given = {name: value for name in GUIDED if (value := getattr(body, name)) is not None}
    constraints += [_made(name, **{GUIDED[name]: value}) for name, value in given.items()]
    if len(constraints) > 1:
        fields = " and ".join(constraint.field for constraint in constraints)
        raise InvalidValue(f"{fields} are given: a request can have one constraint", constraints[1].field)
    return constraints[0] if constraints else None


def constraint_of(body: Sampled, tools: Tools | None) -> Wanted | None:
    """Return the constraint of a request: its own, or the calls that `tool_choice` demands.

    Like OpenAI's, a `response_format` holds for answers, not for calls. Raises InvalidValue that names the field.
    """
    own = structured_of(body)
    if tools is None or tools.mode == "auto":
        if own is not None and tools is not None:
            warn_once(f"{own.field} with tools and tool_choice 'auto' leaves the model no calls")
        return own
    if own is not None and not own.field.startswith("response_format"):
        raise InvalidValue(f"{own.field} and a tool_choice that demands a call are given: leave one out", "tool_choice")
    for schema in tools.schemas.values() if tools.mode == "required" else [tools.schemas[tools.name or ""]]:
        check_schema("tools", schema)
    if tools.mode == "required":
        schema = required_schema(tools.schemas, tools.parallel)
    else:
        assert tools.name is not None
        schema = named_schema(tools.schemas[tools.name])
    # A weak model could spend max_tokens on whitespace between the tokens of its JSON.
    return _made("tools", json=schema, lenient=not tools.strict, disable_any_whitespace=True)


def _of_format(given: dict[str, Any] | None) -> Wanted | None:
    if given is None:
        return None
    kind = given.get("type")
    if kind not in FORMATS:
        allowed = ", ".join(FORMATS)
        raise wrong("response_format.type", kind, f"must be one of {allowed}")
    if kind == "text":
        return None
    if kind == "json_object":
        if given.get("schema") is not None:  # as llama.cpp and SGLang have it
            return _of_schema(given["schema"], "response_format.schema", False)
        return Wanted(StructuredOutputs(json_object=True), "response_format")
    if kind == "structural_tag":
        return _made("response_format", structural_tag=given)
    inner = given.get("json_schema")
    field = "response_format.json_schema"
    if not isinstance(inner, dict):
        raise wrong(field, inner, "must be an object with name and schema")
    if not isinstance(inner.get("name"), str):
        raise wrong(f"{field}.name", inner.get("name"), "must be a text")
    if not isinstance(inner.get("strict"), bool | None):
        raise wrong(f"{field}.strict", inner["strict"], "must be true or false")
    return _of_schema(inner.get("schema", {}), f"{field}.schema", inner.get("strict") is True)


def _of_schema(schema: Any, field: str, strict: bool) -> Wanted:
    """Return the constraint of a schema. strict: refuse keywords that cannot be enforced, which OpenAI ignores else."""
    if not isinstance(schema, dict):
        raise wrong(field, schema, "must be an object")
    return _made(field, json=schema, lenient=not strict)


def _made(field: str, **given: Any) -> Wanted:
    try:
        return Wanted(StructuredOutputs(**_written(given)), field)
    except InvalidValue as error:
        raise InvalidValue(f"{field}: {error}", field) from error


def _written(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with objects as JSON text. msgspec holds other threads up a tenth as long as `json`."""
    objects = {name: given[name] for name in ("json", "structural_tag") if isinstance(given.get(name), dict)}
    return {**given, **{name: msgspec.json.encode(value).decode() for name, value in objects.items()}}


async def compiled(compiler: Compiler, wanted: Wanted) -> StructuredOutputs:
    """Compile a constraint in another thread, and return it.

    Raises InvalidValue that names the field, or Unavailable if other constraints are first.
    """
    compiling = asyncio.wrap_future(compiler.compile(wanted.outputs))
    done, _ = await asyncio.wait([compiling], timeout=PATIENCE)
    if not done:
        raise late(wanted.field)
    try:
        await compiling
    except InvalidValue as error:
        raise InvalidValue(f"{wanted.field}: {error}", wanted.field) from error
    return wanted.outputs
