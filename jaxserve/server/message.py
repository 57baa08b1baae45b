"""The message of a chat answer: content, thinking and calls, whole and in deltas."""

from __future__ import annotations

import secrets
from collections.abc import Container
from typing import Any

from jaxserve.tools.custom import input_of
from jaxserve.tools.events import Event, Parser


class Message:
    """One message as far as it is parsed. Writer: the answer that it belongs to."""

    def __init__(self, parser: Parser, reasoning: bool = True, custom: Container[str] = ()) -> None:
        """reasoning: show the thinking. custom: the names of custom tools, whose calls have an input."""
        self._parser = parser
        self._show = reasoning
        self._custom = custom
        self._inputs = 0  # calls whose input was passed on, or that have none
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []  # of each call

    @property
    def called(self) -> bool:
        return bool(self._calls)

    def add(self, text: str) -> list[dict[str, Any]]:
        """Read text and return the deltas that follow from it."""
        return self._deltas(self._parser.feed(text)) if text else []

    def finish(self) -> list[dict[str, Any]]:
        """Return the last deltas; called once."""
        return self._deltas(self._parser.finish()) + self._input()

    def whole(self, text: str) -> dict[str, Any]:
        """Return the fields of a whole message with this text; called once, and without `add`."""
        self.add(text)
        self.finish()
        content = "".join(self._content)
        message: dict[str, Any] = {"content": content or (None if self._calls else "")}
        if self._show and self._reasoning:
            message |= _thinking("".join(self._reasoning))
        if self._calls:
            message["tool_calls"] = [
                {**call, call["type"]: call[call["type"]] | _argument(call["type"], "".join(parts))}
                for call, parts in zip(self._calls, self._arguments, strict=True)
            ]
        return message

    def _deltas(self, events: list[Event]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for kind, text in events:
            if kind != "arguments":
                deltas += self._input()
            if kind == "content":
                self._content.append(text)
                deltas.append({"content": text})
            elif kind == "reasoning":
                self._reasoning.append(text)
                if self._show:
                    deltas.append(_thinking(text))
            elif kind == "call":
                of = "custom" if text in self._custom else "function"
                call: dict[str, Any] = {"id": f"call_{secrets.token_hex(12)}", "type": of, of: {"name": text}}
                self._calls.append(call)
                self._arguments.append([])
                deltas.append(self._delta({**call, of: call[of] | _argument(of, "")}))
            else:
                self._arguments[-1].append(text)
                if self._calls[-1]["type"] == "function":
                    deltas.append(self._delta({"function": {"arguments": text}}))
        return deltas

    def _input(self) -> list[dict[str, Any]]:
        """Return the delta of a custom call that has ended: its input is known then."""
        seen, self._inputs = self._inputs, len(self._calls)
        if seen == len(self._calls) or self._calls[-1]["type"] != "custom":
            return []
        return [self._delta({"custom": _argument("custom", "".join(self._arguments[-1]))})]

    def _delta(self, call: dict[str, Any]) -> dict[str, Any]:
        return {"tool_calls": [{"index": len(self._calls) - 1, **call}]}


def _argument(kind: str, arguments: str) -> dict[str, str]:
    """Return what a call of this type has besides its name."""
    return {"input": input_of(arguments)} if kind == "custom" else {"arguments": arguments}


def _thinking(text: str) -> dict[str, str]:
    """Return thinking under the name that most clients read, and under vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}
