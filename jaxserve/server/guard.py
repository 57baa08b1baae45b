"""What every request passes through: an id, a limit on its size, its key, and whether the server still takes any."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.failures import Refused, response_of

_GUARDED = ("/v1", "/tokenize", "/detokenize")
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Guard:
    """ASGI middleware. `draining` says whether new work is refused; `keys` empty means that anybody may ask."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], max_body: int, draining: Callable[[], bool]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._max_body = max_body
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if _ID.fullmatch(given) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = name

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        try:
            self._check(scope, headers)
        except Refused as error:
            await response_of(error)(scope, receive, named)
            return
        await self._app(scope, _Counted(receive, self._max_body), named)

    def _check(self, scope: Scope, headers: Headers) -> None:
        path = str(scope["path"])
        guarded = any(path == prefix or path.startswith(prefix + "/") for prefix in _GUARDED)
        if guarded and self._keys and scope["method"] != "OPTIONS":
            scheme, _, key = headers.get("authorization", "").partition(" ")
            said = key.strip().encode()
            if scheme.lower() != "bearer" or not sum(hmac.compare_digest(said, one) for one in self._keys):
                what = "a wrong API key" if said else "no API key"
                raise Refused(401, f"{what}: send `Authorization: Bearer KEY`", code="invalid_api_key")
        if guarded and scope["method"] == "POST" and self._draining():
            raise Refused(503, "the server is shutting down", code="shutting_down", retry_after=5.0)
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_body:
            raise too_large(self._max_body)


def too_large(limit: int) -> Refused:
    """The answer to a body above the limit."""
    return Refused(413, f"the body is larger than {limit} bytes (--max-body-size)", code="body_too_large")


class _Counted:
    """`receive` that refuses a body above the limit also where no length was announced."""

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
