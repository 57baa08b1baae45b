"""A local server of OpenAI's streaming API with known delays and configurable failures."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Endpoint:
    """A local endpoint with delays in seconds.

    fail: every `fail`th request gets a 503. cut: every `cut`th stream breaks off after two tokens.
    slots: requests served at once, the others wait; 0 is no limit.

    Writer of `bodies` and `headers`: the server's thread; read them only after it has stopped.
    """

    ttft: float = 0.05
    gap: float = 0.01
    fail: int = 0
    cut: int = 0
    slots: int = 0
    usage: bool = True
    tokenize: bool = True
    in_stream_error: bool = False
    odd: bytes = b""  # sent as it is after the second token of the first stream, instead of its last events
    on_request: Callable[[int], None] = lambda number: None  # called with each request's number, from 1
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def running(self) -> Iterator[Endpoint]:
        loop, ready = asyncio.new_event_loop(), threading.Event()
        stop = asyncio.Event()

        async def serve() -> None:
            self._gate = asyncio.Semaphore(self.slots or 10_000)
            server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()
            await stop.wait()
            server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
        thread.start()
        assert ready.wait(10)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                headers: dict[str, str] = {}
                while (line := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = line.decode().partition(":")
                    headers[name.strip().lower()] = value.strip()
                body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
                await self._answer(method, path, headers, body, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, _Cut):
            pass
        finally:
            writer.close()

    async def _answer(
        self, method: str, path: str, headers: dict[str, str], body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        if path == "/v1/models":
            return _json(writer, 200, {"object": "list", "data": [{"id": "toy", "owned_by": "jaxserve"}]})
        if path == "/tokenize":
            found = {"tokens": [10, 11, 12, 11]} if self.tokenize else {"error": "no such path"}
            return _json(writer, 200 if self.tokenize else 404, found)
        if not body:  # asks whether the path exists
            return _json(writer, 422, {"detail": "Field required"})
        self.bodies.append(body)
        self.headers.append(headers)
        number = len(self.bodies)
        self.on_request(number)
        if self.fail and number % self.fail == 0:
            return _json(writer, 503, {"error": {"message": "the queue is full", "type": "overloaded"}})
        async with self._gate:
            await self._stream(body, "chat" in path, bool(self.cut and number % self.cut == 0), writer)

    async def _stream(self, body: dict[str, Any], chat: bool, cut: bool, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        count = body.get("max_completion_tokens") or body["max_tokens"]
        if chat:
            _event(writer, {"choices": [_choice(chat, None, role=True)]})
        await asyncio.sleep(self.ttft)
        for index in range(count):
            if index:
                await asyncio.sleep(self.gap)
            if index == 2 and self.in_stream_error:
                _event(writer, {"error": {"message": "the device is gone"}})
                break
            if index == 2 and cut:
                raise _Cut
            if index == 2 and self.odd and len(self.bodies) == 1:
                return writer.write(f"{len(self.odd):x}\r\n".encode() + self.odd + b"\r\n0\r\n\r\n")
            _event(writer, {"choices": [_choice(chat, "x" if index != 1 or chat else "")]})
            await writer.drain()
        _event(writer, {"choices": [_choice(chat, "", finish="length")]})
        if self.usage and body.get("stream_options", {}).get("include_usage"):
            prompt = body.get("prompt") or body["messages"][0]["content"].split()
            _event(writer, {"choices": [], "usage": _usage(len(prompt), count)})
        data = b"data: [DONE]\n\n"
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n0\r\n\r\n")
        await writer.drain()


class _Cut(Exception):
    """Raised to close the connection in the middle of a stream."""


def _usage(prompt: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _choice(chat: bool, text: str | None, *, finish: str | None = None, role: bool = False) -> dict[str, Any]:
    delta = {"role": "assistant", "content": ""} if role else {"content": text}
    return {"index": 0, "finish_reason": finish, **({"delta": delta} if chat else {"text": text})}


def _event(writer: asyncio.StreamWriter, payload: dict[str, Any]) -> None:
    common = {"id": "r", "object": "text_completion", "created": 0, "model": "toy"}
    data = b"data: " + json.dumps(common | payload).encode() + b"\n\n"
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _json(writer: asyncio.StreamWriter, status: int, payload: dict[str, Any]) -> None:
    data = json.dumps(payload).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
