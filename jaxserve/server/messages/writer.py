"""The answer to `POST /v1/messages`, made from the chunks of a chat completion, and its events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from jaxserve.server.answers import Answer
from jaxserve.server.failures import refusal
from jaxserve.server.messages.errors import anthropic_body
from jaxserve.server.replies import Event, Writer
from jaxserve.server.sse import named_event

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
PING: Event = {"type": "ping"}
KINDS = {  # of blocks: of their deltas, and the field that these have
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def new_message(answer: Answer) -> dict[str, Any]:
    """Return the message of a request before its content."""
    prompt = sum(len(job.request.prompt) for job in answer.jobs)
    usage = {"input_tokens": prompt, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}
    return {
        "id": f"msg_{secrets.token_hex(16)}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


class MessageWriter(Writer):
    """A message as far as it is generated, in blocks."""

    field = "content"

    def __init__(self, message: dict[str, Any], request_id: str | None = None) -> None:
        super().__init__(message)
        self._request_id = request_id
        self._begun = False

    # as a dialect

    def waits(self) -> bytes:
        return b"".join(map(named_event, self.begin() or [PING]))

    def failure(self, error: Exception) -> bytes:
        return named_event(anthropic_body(refusal(error), self._request_id))

    # events

    def begin(self) -> list[Event]:
        if self._begun:
            return []
        self._begun = True
        return [{"type": "message_start", "message": {**self.answer, "content": []}}, PING]

    def add(self, chunk: Mapping[str, Any]) -> list[Event]:
        if (usage := chunk.get("usage")) is not None:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            told = {"input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached}
            self.answer["usage"] |= {**told, "output_tokens": usage["completion_tokens"]}
            if "slo" in usage:
                self.answer["usage"]["slo"] = usage["slo"]
        events = []
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            for kind, text in (("thinking", delta.get("reasoning_content")), ("text", delta.get("content"))):
                if text:
                    events += self._say(kind, text)
            for call in delta.get("tool_calls") or ():
                events += self._call(call["index"], call)
            if (reason := choice.get("finish_reason")) is not None:
                self._stop(reason, choice.get("stop_reason"))
        return events

    def finish(self) -> list[Event]:
        events = [] if self.answer["content"] else self._open("text", {"type": "text", "text": ""})
        events += self._close()
        told = {name: self.answer[name] for name in ("stop_reason", "stop_sequence")}
        return [
            *events,
            {"type": "message_delta", "delta": told, "usage": dict(self.answer["usage"])},
            {"type": "message_stop"},
        ]

    def _stop(self, reason: str, sequence: object) -> None:
        stopped = reason == "stop" and isinstance(sequence, str)
        self.answer["stop_reason"] = "stop_sequence" if stopped else REASONS.get(reason, "end_turn")
        self.answer["stop_sequence"] = sequence if stopped else None

    # blocks

    def _say(self, kind: str, text: str) -> list[Event]:
        events = []
        if self._kind != kind:
            more = {"signature": ""} if kind == "thinking" else {}
            events = self._open(kind, {"type": kind, KINDS[kind][1]: "", **more})
        self._texts.append(text)
        return [*events, self._delta(text)]

    def _call(self, index: int, call: Mapping[str, Any]) -> list[Event]:
        events, function = [], call.get("function") or {}
        if self._kind != ("tool_use", index):
            block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
            events = self._open(("tool_use", index), block)
        if arguments := function.get("arguments"):
            self._texts.append(arguments)
            events.append(self._delta(arguments))
        return events

    def _open(self, kind: object, block: dict[str, Any]) -> list[Event]:
        """Begin a block, after the one before."""
        events = self._close()
        self._kind = kind
        self.answer["content"].append(block)
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": dict(block)}]

    def _delta(self, text: str) -> Event:
        kind, field = KINDS[self._current["type"]]
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, field: text}}

    def _close(self) -> list[Event]:
        """End the block that is being written, if there is one."""
        if self._kind is None:
            return []
        text, kind = "".join(self._texts), self._current["type"]
        self._kind, self._texts = None, []
        if kind == "tool_use":
            self._current["input"] = _arguments(text)
        else:
            self._current[KINDS[kind][1]] = text
        return [{"type": "content_block_stop", "index": self._index}]


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; none if the output ended before they were complete."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
