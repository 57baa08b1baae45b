"""The message of a chat answer: content, thinking and calls, whole and in deltas."""

from __future__ import annotations

import secrets
from typing import Any

from jaxserve.tools.events import Event, Parser


class Message:
    """One message as far as it is parsed. Writer: the answer that it belongs to."""

    def __init__(self, parser: Parser, reasoning: bool = True) -> None:
        """reasoning: show the thinking."""
        self._parser = parser
        self._show = reasoning
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []  # of each call

    @property
    def called(self) -> bool:
        """Whether the message has a call."""
        return bool(self._calls)

    def add(self, text: str) -> list[dict[str, Any]]:
        """Read text and return the deltas that follow from it."""
        return self._deltas(self._parser.feed(text)) if text else []

    def finish(self) -> list[dict[str, Any]]:
        """Return the last deltas; called once."""
        return self._deltas(self._parser.finish())

    def whole(self, text: str) -> dict[str, Any]:
        """Return the fields of a whole message with this text; called once, and without `add`."""
        self.add(text)
        self.finish()
        content = "".join(self._content)
        made: dict[str, Any] = {"content": content or (None if self._calls else "")}
        if self._show and self._reasoning:
            made |= _thinking("".join(self._reasoning))
        if self._calls:
            made["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": "".join(parts)}}
                for call, parts in zip(self._calls, self._arguments, strict=True)
            ]
        return made

    def _deltas(self, events: list[Event]) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        for kind, text in events:
            if kind == "content":
                self._content.append(text)
                made.append({"content": text})
            elif kind == "reasoning":
                self._reasoning.append(text)
                if self._show:
                    made.append(_thinking(text))
            elif kind == "call":
                call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": text}}
                self._calls.append(call)
                self._arguments.append([])
                function = {"name": text, "arguments": ""}
                made.append({"tool_calls": [{"index": len(self._calls) - 1, **call, "function": function}]})
            else:
                self._arguments[-1].append(text)
                made.append({"tool_calls": [{"index": len(self._calls) - 1, "function": {"arguments": text}}]})
        return made


def _thinking(text: str) -> dict[str, str]:
    """Return thinking under the name that most clients read, and under vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}
