"""Replies of routes that generate: what a route makes, or an error in the shape of its API.

APIs other than chat have a `Writer`, which turns the chunks of a chat completion into their events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from jaxserve.server.answers import Answer
from jaxserve.server.failures import response_of
from jaxserve.server.openai import ChatBody
from jaxserve.server.service import Service
from jaxserve.server.sse import Dialect, Disconnected, EventStream, while_connected

Event = dict[str, Any]


async def left(_: Request, error: Exception) -> Response:
    """Return the response for a client that has disconnected; it only sets the status in the access log."""
    return Response(status_code=499)


async def replied(
    request: Request, answer: Awaitable[Response], failed: Callable[[Exception], Response] = response_of
) -> Response:
    """Return the response of a route. All errors become responses here, so that none reaches uvicorn's 500 page."""
    try:
        return await answer
    except (Disconnected, ClientDisconnect) as error:
        return await left(request, error)
    except Exception as error:
        return failed(error)


class Writer(Protocol):
    """The answer of an API as far as it is generated."""

    def begin(self) -> list[Event]:
        """Return the first events, when called first; none later."""

    def add(self, chunk: Mapping[str, Any]) -> list[Event]:
        """Add a chunk of a chat completion; return its events."""

    def finish(self) -> list[Event]:
        """Complete the answer, and return the last events."""


async def written(service: Service, answer: Answer, chat: ChatBody, writer: Writer, request: Request) -> None:
    """Run an answer to its end, so that its writer has the whole."""

    async def run() -> None:
        async for _ in _events(service, answer, chat, writer):
            pass

    await while_connected(request.receive, run(), service.ending)


async def streamed(
    service: Service, answer: Answer, chat: ChatBody, writer: Writer, dialect: Dialect, request: Request
) -> Response:
    """Return the stream of an answer's events. An early error is raised."""
    source = _events(service, answer, chat, writer)
    return await EventStream.start(source, request.receive, service.ending, dialect)


async def _events(service: Service, answer: Answer, chat: ChatBody, writer: Writer) -> AsyncGenerator[Event, None]:
    """Run an answer and yield the events of its stream. A client that does not stream gets the same answer."""
    async with aclosing(service.chunks(answer, chat)) as chunks:
        async for chunk in chunks:
            for event in [*writer.begin(), *writer.add(chunk)]:
                yield event
    for event in writer.finish():
        yield event
