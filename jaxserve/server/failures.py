"""Errors as HTTP responses in OpenAI's shape, with the status codes that clients expect."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.errors import ECHO, ContextOverflow, InvalidValue, JaxserveError, QueueFull, short
from jaxserve.generation.generate import GenerationFailed
from jaxserve.sched.api.errors import Unavailable
from jaxserve.sched.api.plan import UNAVAILABLE

logger = logging.getLogger("jaxserve.server")

MAX_MESSAGE = 1000  # characters; `short` already truncates the values in messages

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_GIVEN_UP = {  # by the reason of the engine: status, code, and seconds after which the request may succeed
    "rejected": (400, "rejected", None),
    UNAVAILABLE: (503, "unavailable", 5.0),
    "expired": (503, "queue_timeout", 5.0),
    "refused": (429, "slo_unattainable", 1.0),
}


class Refused(JaxserveError):
    """An error with its own HTTP status. `retry_after`: seconds after which the request may succeed."""

    overflow: ContextOverflow | None = None  # the error, if the context is too short
    headers: Mapping[str, str] | None = None  # of its response

    def __init__(
        self, status: int, message: str, param: str | None = None, code: Any = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after


def wrong(name: str, value: object, rule: str) -> InvalidValue:
    """Return the error of the field `name`, whose value breaks a rule."""
    return InvalidValue(f"{name}={short(value)} {rule}", name)


def refusal(error: Exception) -> Refused:
    """Convert any exception to a Refused. An unexpected one becomes a 500 and is logged with its traceback."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, ContextOverflow):
        refused = Refused(400, str(error), error.param, "context_length_exceeded")
        refused.overflow = error
        return refused
    if isinstance(error, InvalidValue):
        return Refused(400, str(error), error.param)
    if isinstance(error, QueueFull):
        return Refused(503, str(error), code="queue_full", retry_after=error.retry_after)
    if isinstance(error, HTTPException):
        return Refused(error.status_code, str(error.detail))
    if isinstance(error, GenerationFailed):
        status, code, retry_after = _GIVEN_UP.get(error.reason, (500, error.reason, None))
        return Refused(status, str(error), code=code, retry_after=retry_after)
    if isinstance(error, Unavailable):
        return Refused(503, str(error), code="unavailable", retry_after=error.retry_after)
    if isinstance(error, JaxserveError):
        return Refused(503, str(error), code="unavailable", retry_after=1.0)
    if isinstance(error, MemoryError):  # of this request alone: what it held is free again
        logger.error("there was not enough memory for a request")
        return Refused(503, "not enough memory for this request: try again later", code="no_memory", retry_after=5.0)
    logger.error("internal error", exc_info=error)
    return Refused(500, f"internal error: {type(error).__name__}; see the server's log")


def body_of(refused: Refused) -> dict[str, Any]:
    """Return the response body: `{"error": {message, type, param, code}}`."""
    kind = _TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "internal_server_error")
    code = refused.status if refused.code is None else refused.code
    message, param = str(refused), refused.param
    if len(message) > MAX_MESSAGE:
        message = message[: MAX_MESSAGE - 1] + "…"
    return {"error": {"message": message, "type": kind, "param": param and param[:100], "code": code}}


def response_of(
    error: Exception,
    shape: Callable[[Refused], dict[str, Any]] = body_of,
    statuses: Callable[[Refused], int] = lambda refused: refused.status,
) -> Response:
    """Return the HTTP response for an error. shape and statuses: return its body and status, as an API has them."""
    refused = refusal(error)
    headers = dict(getattr(error, "headers", None) or {})
    if refused.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(refused.retry_after)))
    if refused.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(shape(refused), statuses(refused), headers)


def routes_of(app: FastAPI) -> dict[str, list[str]]:
    """Return the methods of each documented path of an application."""
    methods: dict[str, list[str]] = {}
    for route in app.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            methods.setdefault(route.path, []).extend(sorted(route.methods or ()))
    return methods


async def unrouted(routes: Mapping[str, Sequence[str]], request: Request, error: Exception) -> Response:
    """Raise the error of an unknown path or method, naming those that exist; the guard writes it as the API does."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    asked = f"{method} {path if len(path) <= ECHO else path[: ECHO - 1] + '…'}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        there = ", ".join(f"{'/'.join(methods)} {path}" for path, methods in routes.items())
        raise Refused(404, f"no route {asked} here; routes: {there}", code="unknown_route")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "")
        refused = Refused(405, f"no route {asked} here; {path[:ECHO]} takes {allowed}", code="wrong_method")
        refused.headers = {"Allow": allowed}
        raise refused
    return response_of(error)


async def handler(_: Request, error: Exception) -> Response:
    """Return the response for an error, as `add_exception_handler` requires."""
    return response_of(error)
