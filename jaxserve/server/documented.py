"""`/openapi.json`: bodies are parsed by hand, so FastAPI has to be told of them, and of errors in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from jaxserve.server.openai import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    RolesBody,
    StageSLO,
    StreamOptions,
    TokenizeBody,
)

BODIES = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, RolesBody)
_REF = "#/components/schemas/{model}"


class ErrorDetail(BaseModel):
    """What went wrong, and the field that it is about."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorAnswer(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


def body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the part of a route's description that names its body, and its errors."""
    error = {"application/json": {"schema": {"$ref": _REF.format(model=ErrorAnswer.__name__)}}}
    body = {"application/json": {"schema": {"$ref": _REF.format(model=kind.__name__)}}}
    return {
        "requestBody": {"required": True, "content": body},
        "responses": {
            "4XX": {"description": "The request is refused; `param` names the field.", "content": error},
            "5XX": {"description": "It cannot be served now, or failed.", "content": error},
        },
    }


def document(app: FastAPI) -> None:
    """Put the schemas of all bodies, and of what they hold, where the routes refer to."""
    describe = app.openapi

    def described() -> dict[str, Any]:
        made = describe()
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        for kind in (*BODIES, StreamOptions, StageSLO, ErrorDetail, ErrorAnswer):
            schema = kind.model_json_schema(ref_template=_REF)
            schema.pop("$defs", None)  # each of them is in this list
            schemas[kind.__name__] = schema
        return made

    app.openapi = described  # type: ignore[method-assign]
