"""A conversation with a server of OpenAI's API: its messages, and each answer with its measured times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import aiohttp
import msgspec

from jaxserve.bench.backends import OWNERS
from jaxserve.bench.client import BrokeOff, Target, beginning, events, refusal
from jaxserve.bench.discover import models, reaching
from jaxserve.errors import InvalidValue, JaxserveError
from jaxserve.report.printable import printable

TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)  # an answer may take as long as it does


class NoAnswer(JaxserveError):
    """The server refused a message, or its answer broke off."""


@dataclass(slots=True)
class Reply:
    """An answer, as far as it has come. Times in seconds, as the client saw them. Writer: `Conversation.ask`."""

    text: str = ""
    ttft: float | None = None
    last: float = 0.0  # from sending to the last piece
    pieces: int = 0
    tokens: int = 0  # as the server counts them; 0 if it does not say
    promised: Mapping[str, Any] = field(default_factory=dict)  # `usage.slo` of a jaxserve server

    @property
    def count(self) -> int:
        """Tokens, or pieces if the server counts none."""
        return self.tokens or self.pieces

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None without a second one."""
        return None if self.ttft is None or self.count < 2 else (self.last - self.ttft) / (self.count - 1)


class Conversation:
    """The messages of one conversation, and what is asked of the server with each. Writer: the command."""

    def __init__(self, target: Target, system: str | None = None, sampling: Mapping[str, Any] | None = None) -> None:
        self.target = target
        self.ours = False  # the server knows objectives
        self.objectives: dict[str, float] = {}  # fields in ms
        self._system = system
        self._sampling = dict(sampling or {})
        self.messages: list[dict[str, str]] = []
        self.clear()

    def clear(self) -> None:
        """Forget every message but the system's."""
        self.messages[:] = [{"role": "system", "content": self._system}] if self._system else []

    async def meet(self) -> None:
        """Ask the server for its model and what it is. Raises InvalidValue if it cannot be reached."""
        async with self._open() as http:
            with reaching(self.target):
                listed = await models(http, self.target)
        names = [str(entry["id"]) for entry in listed if entry.get("id")]
        if not self.target.model and not names:
            raise InvalidValue(f"{self.target.base_url}/v1/models lists no model: set --model", "model")
        if names and self.target.model and self.target.model not in names:
            raise InvalidValue(f"model={self.target.model!r} must be one of {printable(', '.join(names))}", "model")
        model = self.target.model or names[0]
        own = next((entry for entry in listed if entry.get("id") == model), {})
        self.target = replace(self.target, model=model)
        self.ours = own.get("owned_by") == OWNERS[0]

    async def ask(self, text: str, on_text: Callable[[str, bool], None]) -> Reply:
        """Send a message and read its answer; `on_text` gets each piece, and whether it is thinking.

        An answer that is stopped (CancelledError) or breaks off (NoAnswer) stays in the conversation as far as it
        came; without any, the conversation is as before.
        """
        reply = Reply()
        self.messages.append({"role": "user", "content": text})
        try:
            await self._read(reply, on_text)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, BrokeOff) as error:
            raise NoAnswer(f"{self.target.base_url}: {error or type(error).__name__}") from error
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            raise NoAnswer(f"{self.target.base_url} sent what is no event of OpenAI's API: {error}") from error
        finally:
            if reply.text:
                self.messages.append({"role": "assistant", "content": reply.text})
            else:
                self.messages.pop()
        return reply

    async def _read(self, reply: Reply, on_text: Callable[[str, bool], None]) -> None:
        body = {"model": self.target.model, "messages": self.messages, "stream": True, **self._sampling}
        body["stream_options"] = {"include_usage": True}
        async with self._open() as http:
            sent = perf_counter()
            async with http.post(self.target.base_url + self.target.path, json=body | self.objectives) as answer:
                if answer.status != 200:
                    raise NoAnswer(refusal(answer.status, await beginning(answer.content)))
                task = asyncio.current_task()
                async for event in events(answer.content.iter_any()):
                    if task is not None and task.cancelling():  # a library on the way has caught the cancellation
                        raise asyncio.CancelledError
                    self._take(event, reply, perf_counter() - sent, on_text)

    def _take(self, event: Any, reply: Reply, at: float, on_text: Callable[[str, bool], None]) -> None:
        """Add one event to a reply. Raises NoAnswer for an error that the stream carries."""
        if not isinstance(event, dict):
            return
        if error := event.get("error"):
            raise NoAnswer(str(error.get("message", error)) if isinstance(error, dict) else str(error))
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            said = delta.get("content")
            for piece, thinking in ((thought, True), (said, False)):
                if piece and isinstance(piece, str):
                    reply.ttft = at if reply.ttft is None else reply.ttft
                    reply.last, reply.pieces = at, reply.pieces + 1
                    reply.text += "" if thinking else piece
                    on_text(piece, thinking)
        if usage := event.get("usage"):
            promised = dict(usage.get("slo") or {})
            reply.promised = {name: float(value) for name, value in promised.items() if isinstance(value, int | float)}
            reply.tokens = max(0, int(float(usage.get("completion_tokens") or 0)))

    def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.target.api_key}"}, timeout=TIMEOUT)
