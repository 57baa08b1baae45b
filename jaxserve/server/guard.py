"""Middleware that every request passes: request id, body size limit, API keys, and refusal while draining."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.errors import short
from jaxserve.report.dashboard_page import PREFIX
from jaxserve.server.failures import Refused, response_of
from jaxserve.server.keys import LOOPBACK, Keys
from jaxserve.server.messages.errors import PATH as ANTHROPIC
from jaxserve.server.messages.errors import anthropic_response
from jaxserve.settings.operations import OperationSettings, listed

logger = logging.getLogger("jaxserve.server")

# Routes that need a key if keys are configured.
_WORK = ("/v1", "/v2", "/pooling", "/score", "/rerank", "/tokenize", "/detokenize", "/tokenizer_info")
_ADMIN = (
    "/v1/admin",
    "/server_info",
    "/reset_prefix_cache",
    "/start_profile",
    "/stop_profile",
)  # routes that need an admin key
_OPEN = ("/health", "/ping", "/livez", "/readyz", "/")  # never need a key, even with --protect-metrics
_PAGE = PREFIX.rstrip("/")  # nor do the files of the dashboard, which have no data
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Guard:
    """The ASGI middleware. `draining` returns whether new work is refused.

    Sets in the request's state `request_id`, and `client`: the name of its API key, or "" without keys.
    """

    def __init__(
        self, app: ASGIApp, keys: Keys, max_body: int, draining: Callable[[], bool], protect: bool = False
    ) -> None:
        self._app = app
        self._keys = keys
        self._max_body = max_body
        self._draining = draining
        self._protect = protect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if _ID.fullmatch(given) else secrets.token_hex(16)
        state = scope.setdefault("state", {})
        state["request_id"], state["client"] = name, ""
        begun, anthropic = False, _below(str(scope["path"]), ANTHROPIC)

        async def named(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = name
                headers["X-Content-Type-Options"] = "nosniff"  # an error may quote markup that it refuses
                if anthropic:
                    headers["request-id"] = name
            await send(message)

        try:
            self._check(scope, headers, state)
            await self._app(scope, _Counted(receive, self._max_body), named)
        except Exception as error:
            if begun:
                raise
            response = anthropic_response(error, name) if anthropic else response_of(error)
            await response(scope, receive, named)

    def _check(self, scope: Scope, headers: Headers, state: dict[str, str]) -> None:
        path, post = str(scope["path"]), scope["method"] == "POST"
        if any(_below(path, prefix) for prefix in _ADMIN):
            self._check_admin(scope, headers)
        elif self._keys.names and self._needs_key(path) and scope["method"] != "OPTIONS":
            said = _bearer(headers) or headers.get("x-api-key", "").strip()  # the latter is Anthropic's
            client = self._keys.client(said)
            if client is None:
                raise _unauthorized("API key", said)
            state["client"] = client
        if post and any(_below(path, prefix) for prefix in _WORK) and self._draining():
            raise Refused(503, "the server is shutting down", code="shutting_down", retry_after=5.0)
        if (coding := headers.get("content-encoding", "identity").strip().lower()) not in ("identity", ""):
            what = f"Content-Encoding: {short(coding)}: send the body without compression"
            raise Refused(415, what, code="unsupported_encoding")
        length = headers.get("content-length", "")
        if length.isdigit() and (len(length) > 18 or int(length) > self._max_body):
            raise too_large(self._max_body)

    def _needs_key(self, path: str) -> bool:
        if self._protect:
            return path not in _OPEN and not _below(path, _PAGE)
        return any(_below(path, prefix) for prefix in _WORK)

    def _check_admin(self, scope: Scope, headers: Headers) -> None:
        """Require an admin key, and refuse requests that a web page could send (docs/guide/security.md).

        Browsers send cross-origin POST requests without preflight unless their content type is JSON, and
        DNS rebinding lets a page reach loopback under the page's host name.
        """
        address = (scope.get("server") or ("",))[0]
        if address in LOOPBACK and _host(headers.get("host", "")) not in LOOPBACK:
            raise Refused(403, "admin routes on loopback need Host: localhost, 127.0.0.1 or [::1]", code="wrong_host")
        if not self._keys.has_admin:
            raise Refused(403, "admin routes are off: start the server with --admin-key", code="admin_off")
        said = _bearer(headers)
        if not self._keys.is_admin(said):
            raise _unauthorized("admin key", said)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] not in ("GET", "HEAD") and kind != "application/json":
            raise Refused(415, "admin routes take Content-Type: application/json only", code="wrong_content_type")


def cors_of(settings: OperationSettings) -> dict[str, Any]:
    """Return the arguments of CORSMiddleware, which answers preflight requests: web pages may call the server."""
    return {
        "allow_origins": settings.origins,
        "allow_credentials": settings.allow_credentials,
        "allow_methods": listed(settings.allowed_methods, "allowed_methods"),
        "allow_headers": listed(settings.allowed_headers, "allowed_headers"),
        "expose_headers": ("X-Request-Id", "Retry-After"),
    }


def _below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + "/")


def _bearer(headers: Headers) -> str:
    """Return the bearer key of a request, or ""."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _host(header: str) -> str:
    """Return the host name of a Host header, without port and brackets."""
    match = re.fullmatch(r"\[([^\]]*)\](?::\d*)?|([^:]*)(?::\d*)?", header)
    return (match[1] or match[2] or "").lower() if match else ""


def _unauthorized(what: str, said: str) -> Refused:
    code = f"invalid_{what.lower().replace(' ', '_')}"
    return Refused(401, f"{'a wrong' if said else 'no'} {what}: send `Authorization: Bearer KEY`", code=code)


def too_large(limit: int) -> Refused:
    return Refused(413, f"the body is larger than {limit} bytes (--max-body-size)", code="body_too_large")


class _Counted:
    """A `receive` that refuses a body above the limit even without a Content-Length."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._seen = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._seen += len(message.get("body", b""))
            if self._seen > self._limit:
                raise too_large(self._limit)
        return message
