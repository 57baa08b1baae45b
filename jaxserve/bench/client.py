"""One streaming request to an OpenAI-compatible server, timed token by token."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import aiohttp
import msgspec

from jaxserve.bench.load import Call
from jaxserve.errors import InvalidValue

SHOWN = 300  # characters of an error response
ANSWER = 16 << 20  # bytes of an answer that is read whole, and of a line of a stream: more is no answer
TIMEOUT = 6 * 3600.0  # seconds; a benchmark waits for the slowest request


@dataclass(slots=True)
class Outcome:
    """The result of one call. Times in seconds: `start` since the run began, the others since `start`.

    Writer: the task that sends the call. `error` is "" if the request succeeded. `text`: the answer, without
    thinking. `thoughts`: chunks of thinking before it; None if the server does not tell them apart. `counted`: the
    server reported the numbers of tokens.
    """

    call: Call
    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itls: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    text: str = ""
    thoughts: int | None = None
    counted: bool = False

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def lag(self) -> float:
        """Seconds by which the call was sent late: the client's own delay, or its concurrency limit."""
        return self.start - self.call.at

    @property
    def tpot(self) -> float:
        """Mean seconds per output token after the first; 0 without one."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """The server, and what to add to every request."""

    base_url: str  # without /v1
    model: str
    chat: bool = False
    endpoint: str | None = None  # instead of /v1/completions or /v1/chat/completions
    headers: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = True
    objectives: bool = True  # send the objectives of each call
    api_key: str = "none"

    @property
    def path(self) -> str:
        return self.endpoint or ("/v1/chat/completions" if self.chat else "/v1/completions")

    def standard(self, call: Call) -> dict[str, Any]:
        """Return the fields that are in OpenAI's API."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "temperature": 0.0}
        body["stream_options"] = {"include_usage": True}
        if self.chat:
            if not isinstance(call.prompt, str):
                raise InvalidValue("a chat endpoint takes text, not token ids", "backend")
            messages = [*call.history, ("user", call.prompt)]
            body["messages"] = [{"role": role, "content": text} for role, text in messages]
            body["max_completion_tokens"] = call.output_tokens
        else:
            body["prompt"] = list(call.text) if not isinstance(call.text, str) else call.text
            body["max_tokens"] = call.output_tokens
        return body

    def extra(self, call: Call) -> dict[str, Any]:
        """Return the fields outside OpenAI's API: objectives, and those of the command line."""
        body: dict[str, Any] = {"ignore_eos": True} if self.ignore_eos else {}
        if self.objectives:
            body |= {name: value for name, value in call.slo.body().items() if value is not None}
        return body | dict(self.extra_body)


class Clock:
    """Records the arrival of tokens in an outcome."""

    __slots__ = ("_last", "_outcome", "_parts", "_sent", "chunks", "finished")

    def __init__(self, outcome: Outcome, began: float) -> None:
        self._outcome = outcome
        self._sent = self._last = perf_counter()
        self.chunks = 0
        self.finished = False  # the server has said why the output ended
        self._parts: list[str] = []
        outcome.start = self._sent - began

    def token(self, text: str = "", thought: bool = False) -> None:
        """Record a chunk with at least one token: its text, and whether it is thinking."""
        now, outcome = perf_counter(), self._outcome
        if thought:
            outcome.thoughts = self.chunks + 1
        else:
            self._parts.append(text)
        if self.chunks == 0:
            outcome.ttft = now - self._sent
        else:
            outcome.itls.append(now - self._last)
        self._last = now
        self.chunks += 1

    def usage(self, prompt_tokens: int, output_tokens: int) -> None:
        self._outcome.prompt_tokens, self._outcome.output_tokens = prompt_tokens, output_tokens
        self._outcome.counted = True

    def end(self) -> None:
        """Record the end of the stream; without usage from the server, a chunk counts as a token."""
        outcome = self._outcome
        outcome.latency = self._last - self._sent
        outcome.text = "".join(self._parts)
        outcome.output_tokens = outcome.output_tokens or self.chunks
        outcome.prompt_tokens = outcome.prompt_tokens or outcome.call.prompt_tokens
        if not self.chunks and not outcome.error:
            outcome.error = "the stream ended without a token"


def read_event(event: Mapping[str, Any], clock: Clock) -> str:
    """Record a decoded event of a stream; return the error that it carries, or ""."""
    if "error" in event:
        error = event["error"]
        return str(error.get("message", error)) if isinstance(error, Mapping) else str(error)
    for choice in event.get("choices") or ():
        clock.finished = clock.finished or choice.get("finish_reason") is not None
        delta = choice.get("delta")
        if delta is None:
            # Some tokens have no text. The last event may have a finish reason and no token.
            if choice.get("text") or choice.get("finish_reason") is None:
                clock.token(choice.get("text") or "")
        else:
            _read_delta(delta, clock)
    if usage := event.get("usage"):
        clock.usage(usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))
    return ""


def _read_delta(delta: Mapping[str, Any], clock: Clock) -> None:
    """Record a chat delta; the role has an event of its own, which is not a token."""
    if text := delta.get("content"):
        clock.token(text)
    elif delta.get("reasoning_content") or delta.get("reasoning"):
        clock.token(thought=True)


def refusal(status: int, body: str) -> str:
    """Return status and message of an error response, whatever form its body has."""
    try:
        said = json.loads(body)
    except ValueError:
        return f"HTTP {status}: {body[:SHOWN]}".rstrip(": ")
    if isinstance(said, dict):
        for name in ("error", "detail", "message"):
            said = said.get(name, said) if isinstance(said, dict) else said
    if isinstance(said, list):  # FastAPI's list of invalid fields
        fields = [detail for detail in said if isinstance(detail, dict) and "msg" in detail]
        said = "; ".join(f"{'.'.join(map(str, detail.get('loc', ())))}: {detail['msg']}" for detail in fields) or said
    text = said if isinstance(said, str) else json.dumps(said)
    return f"HTTP {status}: {text[:SHOWN]}"


class Sender:
    """Sends calls with aiohttp and a JSON parser: what a client spends would count as the server's time."""

    def __init__(self, client: Any, target: Target) -> None:
        self._client = client
        self._target = target

    async def send(self, call: Call, began: float) -> Outcome:
        """Send a call and read its stream to the end; never raises for the server's behavior.

        began: perf_counter at the start of the run.
        """
        outcome, target = Outcome(call), self._target
        body = target.standard(call) | target.extra(call)
        clock = Clock(outcome, began)
        try:
            async with self._client.post(target.base_url + target.path, json=body) as response:
                if response.status != 200:
                    outcome.error = refusal(response.status, await beginning(response.content))
                else:
                    outcome.error = await _read_stream(response.content.iter_any(), clock)
        except Exception as error:  # whatever the server sends fails its request alone
            outcome.error = f"{type(error).__name__}: {error}"[:SHOWN]
        clock.end()
        return outcome


async def beginning(body: aiohttp.StreamReader, most: int = ANSWER) -> str:
    """Return the text of a body, of an endless one the first `most` bytes."""
    read = bytearray()
    async for data in body.iter_any():
        read += data
        if len(read) >= most:
            break
    return bytes(read[:most]).decode(errors="replace")


async def json_of(answer: aiohttp.ClientResponse) -> Any:
    """Return the JSON value of an answer. Raises ValueError if it is none."""
    try:
        return json.loads(await beginning(answer.content))
    except RecursionError:
        raise ValueError("the answer is nested too deeply") from None


class BrokeOff(Exception):
    """A stream ended before [DONE], or goes on with what is no event."""


async def events(received: AsyncIterable[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yield the decoded server-sent events of a stream until [DONE]. Raises BrokeOff if it ends before."""
    rest = b""  # a line of which the end has not arrived
    async for data in received:
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > ANSWER:
            raise BrokeOff(f"an event is longer than {ANSWER >> 20} MiB")
        for line in lines:
            if line.startswith(b"data:"):
                said = line[5:].strip()
                if said == b"[DONE]":
                    return
                if said:
                    try:
                        event = msgspec.json.decode(said)
                    except RecursionError:
                        raise BrokeOff("an event is nested too deeply") from None
                    yield event
    raise BrokeOff("the stream broke off before [DONE]")


async def _read_stream(received: AsyncIterable[bytes], clock: Clock) -> str:
    """Read server-sent events to the end; return the first error, or ""."""
    try:
        async for event in events(received):
            if error := read_event(event, clock):
                return error
    except BrokeOff as error:
        return "" if clock.finished else str(error)
    return ""


@asynccontextmanager
async def open_sender(target: Target, connections: int = 4096) -> AsyncIterator[Sender]:
    """Open a sender with at most this many connections."""
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {target.api_key}", **target.headers},
        timeout=aiohttp.ClientTimeout(total=TIMEOUT),
        connector=aiohttp.TCPConnector(limit=connections),
    ) as http:
        yield Sender(http, target)
