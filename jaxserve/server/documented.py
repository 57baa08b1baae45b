"""Schemas for `/openapi.json`: FastAPI does not know the bodies and errors, because routes parse bodies themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from jaxserve.server.embedding_bodies import EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from jaxserve.server.openai import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    RestartBody,
    RolesBody,
    ScaleBody,
    TokenizeBody,
)

BODIES = (
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    PoolingBody,
    ScoreBody,
    RerankBody,
    TokenizeBody,
    DetokenizeBody,
    RolesBody,
    RestartBody,
    ScaleBody,
)
_REF = "#/components/schemas/{model}"


class ErrorDetail(BaseModel):
    """An error, and the field that it refers to."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorAnswer(BaseModel):
    """The body of every unsuccessful response."""

    error: ErrorDetail


def body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a route's request body and errors."""
    error = {"application/json": {"schema": {"$ref": _REF.format(model=ErrorAnswer.__name__)}}}
    body = {"application/json": {"schema": {"$ref": _REF.format(model=kind.__name__)}}}
    return {
        "requestBody": {"required": True, "content": body},
        "responses": {
            "4XX": {"description": "The request is refused; `param` names the field.", "content": error},
            "5XX": {"description": "The request failed, or cannot be served now.", "content": error},
        },
    }


def document(app: FastAPI, *bodies: type[BaseModel]) -> None:
    """Add the schemas that the routes refer to. bodies: those besides BODIES."""
    describe = app.openapi

    def described() -> dict[str, Any]:
        schema_of_app = describe()
        schemas = schema_of_app.setdefault("components", {}).setdefault("schemas", {})
        kinds: tuple[type[BaseModel], ...] = (*BODIES, *bodies, ErrorDetail, ErrorAnswer)
        for kind in kinds:
            schema = kind.model_json_schema(ref_template=_REF)
            schemas |= schema.pop("$defs", {})
            schemas[kind.__name__] = schema
        return schema_of_app

    app.openapi = described  # type: ignore[method-assign]
