"""Server-sent events, and noticing that nobody listens any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.server.failures import body_of, refusal

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class Disconnected(Exception):
    """The client has gone: there is nobody to answer."""


def event(data: Mapping[str, Any]) -> bytes:
    """One event with a JSON object."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def gone(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects: Disconnected is raised then."""
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait([task, left], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        for one in (task, left):
            one.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


class EventStream(Response):
    """Sends JSON objects as they come, then `[DONE]`.

    The status is sent with the first object, so what fails before it keeps its own status: use `first`. When the
    client disconnects, or the server ends, the source is closed at once. An error later on becomes an event.
    """

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[dict[str, Any], None], first: list[dict[str, Any]]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"  # proxies must not collect events
        self._source = source
        self._first = first

    @classmethod
    async def start(cls, source: AsyncGenerator[dict[str, Any], None], receive: Receive) -> EventStream:
        """Waits for the first object; raises what the source raises until then, and Disconnected."""
        try:
            first = [item] if (item := await while_connected(receive, anext(source, None))) is not None else []
        except BaseException:
            await source.aclose()
            raise
        return cls(source, first)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(Disconnected):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async def body(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async with aclosing(self._source) as source:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for item in self._first:
                await body(event(item))
            try:
                async for item in source:
                    await body(event(item))
            except OSError:
                raise Disconnected from None
            except Exception as error:
                await body(event(body_of(refusal(error))))
            await body(DONE, more=False)
