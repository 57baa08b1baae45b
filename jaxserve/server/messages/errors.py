"""Errors in Anthropic's shape."""

from __future__ import annotations

from typing import Any

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


def anthropic_body(refused: Refused) -> dict[str, Any]:
    """Return the response body: `{"type": "error", "error": {type, message}}`, with the field and code of OpenAI's."""
    told = body_of(refused)["error"]
    if refused.code == NO_THREADS:
        told["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
    kind = _TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    return {"type": "error", "error": {**told, "type": kind}}
