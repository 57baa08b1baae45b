"""Errors in Anthropic's shape."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.responses import Response

from jaxserve.errors import ContextOverflow, short
from jaxserve.server.failures import Refused, body_of, response_of
from jaxserve.server.model_list import UNKNOWN_MODEL

PATH = "/v1/messages"
NO_THREADS = "thread_unsupported_request"  # makes clients send the conversation again, and whole from then on
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# A load that passes has Anthropic's own status: Claude Code comes again, and at 503 it would leave for its fallback
# model. A server that starts, ends or has failed keeps 503, by which proxies choose another one.
OVERLOADED = 529
_LOADS = ("queue_full", "queue_timeout")
_LATER = (408, 409, 429)  # may succeed when sent again


def anthropic_response(error: Exception, request_id: str) -> Response:
    """Return the HTTP response for an error. Claude Code would send a wrong key ten times more if not told."""
    response = response_of(error, partial(anthropic_body, request_id=request_id), _status)
    if response.status_code < 500 and response.status_code not in _LATER:
        response.headers["x-should-retry"] = "false"
    return response


def _status(refused: Refused) -> int:
    return OVERLOADED if refused.status == 503 and refused.code in _LOADS else refused.status


def anthropic_body(refused: Refused, request_id: str | None = None) -> dict[str, Any]:
    """Return the response body: `{"type": "error", "error": {type, message}}`, with the field and code of OpenAI's.

    What clients read from messages has Anthropic's words: the numbers of a context that is too short, to ask for less,
    and `model:`, to take another model.
    """
    told = body_of(refused)["error"]
    if refused.code == NO_THREADS:
        told["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
    kind = _TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    if refused.overflow is not None:
        told["message"] = _overflow(refused.overflow)
    elif refused.code == UNKNOWN_MODEL:
        told["message"] = told["message"].replace("model ", "model: ", 1)
    named = {} if request_id is None else {"request_id": request_id}
    return {"type": "error", "error": {**told, "type": kind}, **named}


def _overflow(error: ContextOverflow) -> str:
    context, prompt = error.context, error.prompt
    if prompt >= context:
        return f"prompt is too long: {'at least ' * error.least}{prompt} tokens > {context - 1} maximum"
    output = short(error.output)
    what = f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {context}"
    return f"{what}, decrease input length or `max_tokens` and try again"
