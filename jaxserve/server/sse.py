"""Server-sent events, and cancellation of work when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.server.failures import Refused, body_of, refusal

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"  # a comment: clients skip it, and neither they nor proxies find the stream silent
PATIENCE = 1.0  # seconds that a stream waits for its first object: a refusal until then has its own status code
SILENCE = 5.0  # seconds without an object after which the client is told that the stream goes on
LAST_WORDS = 0.5  # seconds to send the error event of a stream that a shutdown aborts


class Disconnected(Exception):
    """Raised when the client has disconnected, so that no response can be sent."""


class Ending(Refused):
    """Raised when a shutdown aborts running requests."""

    def __init__(self) -> None:
        super().__init__(503, "the server is shutting down", code="shutting_down", retry_after=5.0)


def event(data: Mapping[str, Any]) -> bytes:
    """Encode a JSON object as one event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def named_event(data: Mapping[str, Any]) -> bytes:
    """Encode a JSON object as one event that is named by its `type`."""
    return b"event: " + str(data["type"]).encode() + b"\n" + event(data)


class Dialect:
    """How an API writes a stream: this is the one of chat and text completions."""

    end = DONE  # after the last object

    def item(self, data: Mapping[str, Any]) -> bytes:
        """Encode an object of the stream."""
        return event(data)

    def waits(self) -> bytes:
        """Return what tells the client that the stream goes on while there is no object."""
        return WAITING

    def failure(self, error: Exception) -> bytes:
        """Encode an error after which the stream ends."""
        return event(body_of(refusal(error)))


COMPLETIONS = Dialect()


async def gone(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


async def while_connected(receive: Receive, work: Awaitable[T], ending: asyncio.Event | None = None) -> T:
    """Return the result of `work`, or cancel it when the client disconnects or `ending` is set.

    Raises Disconnected or Ending in these cases.
    """
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    waited: list[asyncio.Future[Any]] = [task, left]
    if ending is not None:
        waited.append(asyncio.ensure_future(ending.wait()))
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected if left.done() else Ending
        return task.result()
    finally:
        await _cancelled(*waited)


class EventStream(Response):
    """A response that sends JSON objects as events, in the dialect of an API.

    Create it with `start`, which waits for the first object, but not for long: an error until then gets its own
    status code. Later errors and shutdowns become events. A disconnect closes the source at once.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AsyncGenerator[dict[str, Any], None],
        first: asyncio.Future[dict[str, Any] | None],
        ending: asyncio.Event,
        dialect: Dialect = COMPLETIONS,
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"  # proxies must not buffer events
        self._source = source
        self._first = first
        self._ending = ending
        self._dialect = dialect
        self._begun = False
        self._parts = 0  # sent so far

    @classmethod
    async def start(
        cls,
        source: AsyncGenerator[dict[str, Any], None],
        receive: Receive,
        ending: asyncio.Event,
        dialect: Dialect = COMPLETIONS,
    ) -> EventStream:
        """Wait for the first object, at most `PATIENCE`, and return the response.

        Raises Disconnected, Ending, or what the source raises until then.
        """
        first = asyncio.ensure_future(anext(source, None))
        try:
            await while_connected(receive, asyncio.wait([first], timeout=PATIENCE), ending)
            if first.done():
                first.result()
        except BaseException:
            await _cancelled(first)
            await source.aclose()
            raise
        return cls(source, first, ending, dialect)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(Disconnected):
            try:
                await while_connected(receive, self._send(send), self._ending)
            except Ending as error:
                with suppress(TimeoutError):  # the client does not read
                    await asyncio.wait_for(self._end(send, error), LAST_WORDS)

    async def _send(self, send: Send) -> None:
        async with aclosing(self._source) as source:
            helpers: list[asyncio.Future[Any]] = [self._first]
            try:
                await self._begin(send)
                helpers.append(asyncio.ensure_future(self._tell(send)))
                if (item := await self._first) is not None:
                    await self._part(send, self._dialect.item(item))
                async for item in source:
                    await self._part(send, self._dialect.item(item))
            except OSError:
                raise Disconnected from None
            except Exception as error:
                await self._part(send, self._dialect.failure(error))
            finally:
                await _cancelled(*helpers)
            await self._part(send, self._dialect.end, more=False)

    async def _tell(self, send: Send) -> None:
        """Tell the client that the stream goes on: after headers without an object, and where none comes for long."""
        seen = None if self._first.done() else self._parts
        while True:
            if self._parts == seen:
                await self._part(send, self._dialect.waits())
            seen = self._parts
            await asyncio.sleep(SILENCE)

    async def _begin(self, send: Send) -> None:
        self._begun = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _end(self, send: Send, error: Exception) -> None:
        if not self._begun:
            await self._begin(send)
        await self._part(send, self._dialect.failure(error))
        await self._part(send, self._dialect.end, more=False)

    async def _part(self, send: Send, data: bytes, more: bool = True) -> None:
        self._parts += 1
        await send({"type": "http.response.body", "body": data, "more_body": more})


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
