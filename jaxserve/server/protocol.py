"""Limits on headers, time and connections, enforced before the application sees a request.

uvicorn itself bounds none of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from jaxserve.server.failures import Refused, body_of
from jaxserve.settings.fields import HttpSettings

logger = logging.getLogger("jaxserve.server")

FILES = 128  # open files that are not connections
FRAMING = 16  # bytes of chunk framing allowed per byte of the body, in addition to the header limit
HEADER_SIZE = 64 << 10  # bytes of request line, headers and trailers
HEADER_TIMEOUT = 10.0  # seconds to receive the headers of a request
BODY_TIMEOUT = 60.0  # seconds to receive its body
MOST_IN_A_ROW = 64  # requests that a client may send before it has the answer to the first
IN_A_ROW = 2e-3  # seconds between an answer and the next of these: they take no whole core


def most_connections(settings: HttpSettings) -> int:
    """Return how many connections a server takes, after raising the process's limit of open files if they need it."""
    most = settings.max_connections
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = most + FILES if hard == resource.RLIM_INFINITY else min(most + FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        if soft != resource.RLIM_INFINITY and soft - FILES < most:
            most = max(1, soft - FILES)
            logger.warning("max_connections is %d: this process may open only %d files (ulimit -n)", most, soft)
    except (ImportError, ValueError, OSError):  # on Windows, or in a sandbox
        logger.debug("the limit of open files cannot be read or raised", exc_info=True)
    return most


def protocol_of(most: int) -> type[asyncio.Protocol]:
    """Return the protocol factory that uvicorn calls for each connection; it refuses more than `most` of them."""
    return cast(type[asyncio.Protocol], partial(BoundedProtocol, _Room(most)))


class _Room:
    """Room for a number of connections. Those without a request make way for others. Writer: the event loop."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.new: dict[BoundedProtocol, None] = {}  # connections that have sent no headers, oldest first
        self.kept: dict[BoundedProtocol, None] = {}  # connections that wait for a further request, likewise

    def leave(self, connection: BoundedProtocol) -> None:
        """Note that a connection has a request, or is closed."""
        self.new.pop(connection, None)
        self.kept.pop(connection, None)

    def make(self) -> bool:
        """Close the oldest connection without a request; return False if there is none."""
        waiting = self.new or self.kept
        if waiting:
            oldest = next(iter(waiting))
            oldest.make_way(told=waiting is self.new)
            self.leave(oldest)
        return bool(waiting)


class BoundedProtocol(HttpToolsProtocol):
    """An HTTP/1.1 protocol with a deadline for headers and body, and a bound on all bytes besides the body.

    The header deadline starts when the connection opens or, after a response, with the first byte of
    the next request. uvicorn's keep-alive timeout closes connections that are idle after a response.
    """

    def __init__(self, room: _Room, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.parser = _Parser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn, for pipelined requests
        self._room = room
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: Refused | None = None
        self._begun = False  # a request has begun and its headers are incomplete
        self._messages = 0
        self._bytes = 0  # received since the message began, without the read that began it
        self._fields = 0  # bytes in complete headers and trailers
        self._body = 0  # bytes of the body

    # the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, Corked(transport, self.loop)))
        if len(self.connections) > self._room.most and not self._room.make():
            self.make_way(told=True)
        else:
            self._room.new[self] = None
            self._arm(HEADER_TIMEOUT, self._late_headers)

    def make_way(self, *, told: bool) -> None:
        """Close the connection, as there are too many. told: the client learns why."""
        if told:
            text = f"{self._room.most} connections are open (--max-connections): try again later"
            self._refuse(Refused(503, text, code="too_many_connections", retry_after=1.0))
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._room.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.parser is None or self.transport.is_closing():
            return
        messages = self._messages
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._bytes = self._bytes + len(data) if messages == self._messages else 0
        if self._bytes - self._body > HEADER_SIZE + FRAMING * self._body:
            self._refuse(self._too_large())
        elif self._timer is None and self._waits_for_headers:
            self._arm(HEADER_TIMEOUT, self._late_headers)

    @property
    def _waits_for_headers(self) -> bool:
        """Whether received bytes belong to a request whose headers are incomplete, blank lines included."""
        return self._begun or self.cycle is None or (self.cycle.response_complete and not self.cycle.more_body)

    # the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if len(self.pipeline) >= MOST_IN_A_ROW:
            text = f"more than {MOST_IN_A_ROW} requests wait for their answers on this connection: open further ones"
            self._refusal = Refused(429, text, code="too_many_in_a_row", retry_after=1.0)
            raise ValueError
        self._begun, self._messages = True, self._messages + 1
        self._bytes = self._fields = self._body = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    @property
    def head(self) -> bytes:
        """The request line and the headers of the last request, without `Upgrade`."""
        start = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        lines = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join((start, *lines, b"\r\n"))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":  # what follows its headers is no HTTP
                self._refusal = Refused(405, "CONNECT is not supported: this server is no proxy", code="wrong_method")
                raise ValueError
            return  # the parser begins again
        self._begun = False
        self._room.leave(self)
        self._arm(BODY_TIMEOUT, self._late_body)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._disarm()
        super().on_message_complete()
        if self.cycle is not None:
            self.cycle.more_body = False  # uvicorn does not reset it if the response came first

    def _count(self, size: int) -> None:
        self._fields += size
        if self._fields > HEADER_SIZE:
            self._refusal = self._too_large()
            raise ValueError  # stops the parser, which calls `send_400_response`

    def _too_large(self) -> Refused:
        return Refused(431, f"the headers are larger than {HEADER_SIZE} bytes", code="headers_too_large")

    # refusals

    def send_400_response(self, msg: str) -> None:
        """Refuse the request; uvicorn calls this after a parser error."""
        self._refuse(self._refusal or Refused(400, msg, code="invalid_http"))

    def _late_headers(self) -> None:
        if not self._begun and self.cycle is not None:
            self.transport.close()  # a kept-alive connection that sent only blank lines
        else:
            self._refuse(Refused(408, f"no complete headers within {HEADER_TIMEOUT:g} s", code="timeout"))

    def _late_body(self) -> None:
        self._refuse(Refused(408, f"no complete body within {BODY_TIMEOUT:g} s", code="timeout"))

    def _refuse(self, refused: Refused) -> None:
        """Send an error unless a response has begun, and close the connection.

        The application sees a disconnect.
        """
        self._disarm()
        cycle = self.cycle
        if cycle is None or not cycle.response_started or (cycle.response_complete and not cycle.more_body):
            content = json.dumps(body_of(refused)).encode()
            head = STATUS_LINE[refused.status]
            head += b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(content)
            if refused.retry_after is not None:
                head += b"retry-after: %d\r\n" % max(1, round(refused.retry_after))
            self.transport.write(head + b"\r\n" + content)
        self.transport.close()

    def _arm(self, seconds: float, late: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def on_response_complete(self) -> None:
        if self.pipeline:
            self.loop.call_later(IN_A_ROW, super().on_response_complete)
            return
        if not self.transport.is_closing():
            self._room.kept[self] = None
        super().on_response_complete()

    # HTTP/1.0

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = partial(_until_closed, app, cycle)
        super()._start_asgi_task(cycle, partial(_or_cut, app, cycle))


class Corked:
    """A transport that keeps what is written until all tasks that are ready have run. Writer: its protocol.

    The tokens of a step reach many connections in one turn of the event loop. A client process that sleeps is
    woken by the first byte; were the next connection written only after more Python code, it could be asleep again.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Keep `data`; it is sent in the next turn of the event loop."""
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)

    def close(self) -> None:
        """Send what is kept, and close the transport."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():  # the client may have reset the connection meanwhile
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))


class _Parser(httptools.HttpRequestParser):
    """A parser that ignores `Upgrade`, as RFC 9110, section 7.8, allows.

    httptools would stop after the headers, and read the body as the next request.
    """

    def __init__(self, protocol: BoundedProtocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol

    def feed_data(self, data: bytes | bytearray | memoryview[int] | array[int]) -> None:
        rest = memoryview(data)
        while True:
            try:
                super().feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
                super().feed_data(self._protocol.head)


async def _or_cut(app: Any, cycle: RequestResponseCycle, scope: Any, receive: Any, send: Any) -> None:
    """Run `app`, and cut the connection of a response that it has given up because its client does not read.

    Closing it would wait for that client, with all that it has not read.
    """
    await app(scope, receive, send)
    if cycle.response_started and not (cycle.response_complete or cycle.disconnected):
        cycle.transport.abort()
        await asyncio.sleep(0)  # the cycle learns of it


async def _until_closed(app: Any, cycle: RequestResponseCycle, scope: Any, receive: Any, send: Any) -> None:
    """Run `app` for an HTTP/1.0 client, ending a body of unknown length by closing the connection.

    HTTP/1.0 has no chunked encoding, which uvicorn would use. Setting the expected length to that of
    each next part keeps uvicorn from writing chunks.
    """
    measured = True

    async def plain(message: Any) -> None:
        nonlocal measured
        if message["type"] == "http.response.start":
            measured = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not measured:
                cycle.chunked_encoding = False
        elif not measured:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, plain)
