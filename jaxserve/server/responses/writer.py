"""The answer to `POST /v1/responses`, made from the chunks of a chat completion, and its events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from jaxserve.server.answers import Answer
from jaxserve.server.failures import body_of, refusal
from jaxserve.server.replies import Event, Writer
from jaxserve.server.responses.request import ResponsesBody
from jaxserve.server.responses.tools import Tool, arguments_read, new_call
from jaxserve.server.sse import WAITING, named_event


def new_response(body: ResponsesBody, answer: Answer, store: bool) -> dict[str, Any]:
    """Return the response of a request before its output."""
    params = answer.jobs[0].request.params
    text = body.text
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": answer.created,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": answer.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier or "default",
        "store": store,
        "temperature": params.temperature,
        "text": {"format": (text and text.format) or {"type": "text"}} | _some("verbosity", text and text.verbosity),
        "tool_choice": body.tool_choice or "auto",
        "tools": [_described(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _described(tool: dict[str, Any]) -> dict[str, Any]:
    return {"strict": None, "parameters": None, **tool} if tool["type"] == "function" else tool


def _some(name: str, value: Any) -> dict[str, Any]:
    return {} if value is None else {name: value}


class ResponseWriter(Writer):
    """A response as far as it is generated.

    Items: reasoning, a message, function calls, in the order in which the model writes them.
    """

    field = "output"

    def __init__(
        self, response: dict[str, Any], done: Callable[[dict[str, Any]], None], tools: Mapping[str, Tool] | None = None
    ) -> None:
        """done: called with the response before its last event.

        tools: those of the request, by the names that the model knows.
        """
        super().__init__(response)
        self._tools = tools or {}
        self._done = done
        self._sequence = 0
        self._logprobs: list[Any] = []  # of tokens that are no text of a message; they come with its next text
        self._finish: str | None = None

    # as a dialect

    def waits(self) -> bytes:
        return b"".join(map(named_event, self.begin())) + WAITING

    def failure(self, error: Exception) -> bytes:
        refused, events = refusal(error), self._close("incomplete")
        final = "invalid_prompt" if refused.status < 500 else "server_error"  # clients send the latter again
        code = "rate_limit_exceeded" if refused.status == 429 else final
        message = body_of(refused)["error"]["message"]
        self.answer |= {"status": "failed", "error": {"code": code, "message": message}}
        return b"".join(map(named_event, [*events, self._whole("response.failed")]))

    # events

    def begin(self) -> list[Event]:
        return [] if self._sequence else [self._whole("response.created"), self._whole("response.in_progress")]

    def add(self, chunk: Mapping[str, Any]) -> list[Event]:
        if (usage := chunk.get("usage")) is not None:
            self.answer["usage"] = _usage(usage)
        events = []
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            self._logprobs += (choice.get("logprobs") or {}).get("content") or []
            if text := delta.get("reasoning_content"):
                events += self._reason(text)
            if delta.get("content") or (self._logprobs and self._kind == "message"):
                events += self._say(delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                events += self._call(call["index"], call)
            self._finish = choice.get("finish_reason") or self._finish
        return events

    def finish(self) -> list[Event]:
        cut = self._finish == "length"
        events = [] if self.answer["output"] else self._say("")
        events += self._close("incomplete" if cut else "completed")
        if cut:
            self.answer |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        else:
            self.answer |= {"status": "completed", "completed_at": int(time.time())}
        self._done(self.answer)
        return [*events, self._whole(f"response.{self.answer['status']}")]

    # items

    def _reason(self, text: str) -> list[Event]:
        events = self._write("reasoning", "rs", {"summary": []}, {"type": "reasoning_text", "text": ""})
        self._texts.append(text)
        return [*events, self._at("response.reasoning_text.delta", content_index=0, delta=text)]

    def _say(self, text: str) -> list[Event]:
        logprobs, self._logprobs = self._logprobs, []
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        events = self._write("message", "msg", {"role": "assistant"}, part)
        self._texts.append(text)
        self._current["content"][0]["logprobs"] += logprobs
        if text or logprobs:
            events.append(self._at("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs))
        return events

    def _write(self, kind: str, prefix: str, fields: dict[str, Any], part: dict[str, Any]) -> list[Event]:
        """Begin an item with one part of content, unless an item of this type is being written."""
        if self._kind == kind:
            return []
        events = self._open(kind, {"type": kind, "id": _id(prefix), **fields, "content": []})
        events.append(self._part("added", deepcopy(part)))
        self._current["content"].append(part)
        return events

    def _call(self, index: int, call: Mapping[str, Any]) -> list[Event]:
        events, function = [], call.get("function") or {}
        if self._kind != ("call", index):
            name = function["name"]
            item = new_call(self._tools.get(name), name, call["id"])
            events = self._open(("call", index), {"id": _id("fc"), **item})
        if arguments := function.get("arguments"):
            self._texts.append(arguments)
            if self._current["type"] == "function_call":
                events.append(self._at("response.function_call_arguments.delta", delta=arguments))
        return events

    def _open(self, kind: object, item: dict[str, Any]) -> list[Event]:
        """Begin an item, after the one before."""
        events = self._close("completed")
        self._kind = kind
        self.answer["output"].append({**item, "status": "in_progress"})
        added = {**self._current, "content": []} if "content" in item else dict(self._current)
        return [*events, self._event("response.output_item.added", output_index=self._index, item=added)]

    def _close(self, status: str) -> list[Event]:
        """End the item that is being written, if there is one."""
        if self._kind is None:
            return []
        item, kind, text, events = self._current, self._kind, "".join(self._texts), []
        self._kind, self._texts = None, []
        item["status"] = status
        if kind in ("message", "reasoning"):
            part = item["content"][0]
            part["text"] = text
            told = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = [self._at(f"response.{part['type']}.done", content_index=0, **told)]
            events.append(self._part("done", dict(part)))
        else:
            item |= (told := arguments_read(item["type"], text))
            if item["type"] == "function_call":
                events = [self._at("response.function_call_arguments.done", **told, name=item["name"])]
            elif item["type"] == "custom_tool_call":
                events = [self._at("response.custom_tool_call_input.delta", delta=item["input"])]
                events.append(self._at("response.custom_tool_call_input.done", **told))
        return [*events, self._event("response.output_item.done", output_index=self._index, item=dict(item))]

    def _part(self, what: str, part: dict[str, Any]) -> Event:
        return self._at(f"response.content_part.{what}", content_index=0, part=part)

    def _at(self, kind: str, **fields: Any) -> Event:
        """Return an event of the item that is being written."""
        return self._event(kind, item_id=self._current["id"], output_index=self._index, **fields)

    def _whole(self, kind: str) -> Event:
        return self._event(kind, response={**self.answer, "output": list(self.answer["output"])})

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
        **_some("slo", usage.get("slo")),
    }
