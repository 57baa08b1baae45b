"""Replies of routes that generate: what a route makes, or an error in the shape of its API.

APIs other than chat have a `Writer`, which turns the chunks of a chat completion into their events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, ClassVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from jaxserve.sched.api.params import SamplingParams
from jaxserve.server.answers import Answer
from jaxserve.server.failures import response_of
from jaxserve.server.openai import ChatBody, Sampled
from jaxserve.server.service import Service
from jaxserve.server.sse import Dialect, Disconnected, EventStream, named_event, while_connected

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


async def prepared(service: Service, request: Request, body: Sampled) -> Answer:
    """Return the unstarted answer to a request. Raises what `Service.prepare` raises."""
    preparing = service.prepare(body, request.headers, request.state.request_id, request.state.client)
    return await while_connected(request.receive, preparing, service.ending)


async def counted(service: Service, request: Request, chat: ChatBody) -> int:
    """Return the number of tokens of a conversation."""
    encoding = service.prompts.of(chat, SamplingParams(), lambda prompts, n: None)
    prompts = await while_connected(request.receive, encoding, service.ending)
    return len(prompts[0][1])


class Writer(Dialect):
    """The answer of an API as far as it is generated, in parts. Writer: the coroutine that serves the request."""

    end = b""
    field: ClassVar[str]  # of the answer, with its parts

    def __init__(self, answer: dict[str, Any]) -> None:
        """answer: without parts; changed here."""
        self.answer = answer
        self._kind: object = None  # of the part that is being written
        self._texts: list[str] = []  # of that part

    def begin(self) -> list[Event]:
        """Return the first events, when called first; none later."""
        raise NotImplementedError

    def add(self, chunk: Mapping[str, Any]) -> list[Event]:
        """Add a chunk of a chat completion; return its events."""
        raise NotImplementedError

    def finish(self) -> list[Event]:
        """Complete the answer, and return the last events."""
        raise NotImplementedError

    def item(self, data: Mapping[str, Any]) -> bytes:
        return named_event(data)

    @property
    def _current(self) -> dict[str, Any]:
        part: dict[str, Any] = self.answer[self.field][-1]
        return part

    @property
    def _index(self) -> int:
        return len(self.answer[self.field]) - 1


async def reply(
    service: Service, request: Request, answer: Answer, chat: ChatBody, writer: Writer, stream: bool | None
) -> Response:
    """Run an answer, and return what its writer makes of it: a stream of events, or the whole."""
    events = _events(service, answer, chat, writer)
    if stream:
        return await EventStream.start(events, request.receive, service.ending, writer)

    async def run() -> None:
        async for _ in events:
            pass

    await while_connected(request.receive, run(), service.ending)
    return JSONResponse(writer.answer)


async def _events(service: Service, answer: Answer, chat: ChatBody, writer: Writer) -> AsyncGenerator[Event, None]:
    """Run an answer and yield the events of its stream. A client that does not stream gets the same answer."""
    async with aclosing(service.chunks(answer, chat)) as chunks:
        async for chunk in chunks:
            for event in [*writer.begin(), *writer.add(chunk)]:
                yield event
    for event in writer.finish():
        yield event
