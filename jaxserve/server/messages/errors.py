"""Errors in Anthropic's shape."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import ContextOverflow, short
from jaxserve.server.failures import Refused, body_of

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


def anthropic_body(refused: Refused, request_id: str | None = None) -> dict[str, Any]:
    """Return the response body: `{"type": "error", "error": {type, message}}`, with the field and code of OpenAI's.

    A context that is too short has Anthropic's words: clients read the numbers from them, and ask for less.
    """
    told = body_of(refused)["error"]
    if refused.code == NO_THREADS:
        told["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
    kind = _TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    if refused.overflow is not None:
        told["message"] = _overflow(refused.overflow)
    named = {} if request_id is None else {"request_id": request_id}
    return {"type": "error", "error": {**told, "type": kind}, **named}


def _overflow(error: ContextOverflow) -> str:
    context, prompt = error.context, error.prompt
    if prompt >= context:
        return f"prompt is too long: {'at least ' * error.least}{prompt} tokens > {context - 1} maximum"
    output = short(error.output)
    what = f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {context}"
    return f"{what}, decrease input length or `max_tokens` and try again"
