"""gpt-oss (harmony): messages with channels, for thinking, calls and the answer.

openai-harmony reads token ids of one vocabulary, which it downloads; here text is read, as in all other families.
"""

from __future__ import annotations

import re

from jaxserve.tools.events import Call, Event, Parser, Schemas
from jaxserve.tools.marked import overlap
from jaxserve.tools.scan import Scan

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
_TO = re.compile(r"to=(?:functions\.)?([\w.\-]+)")


class Harmony:
    """Reads the messages of one output, which are reported as they arrive."""

    def __init__(self) -> None:
        self._header = True  # the text up to <|message|> is a header
        self._held = ""
        self._seen: list[str] = []  # of a header
        self._kind = "content"
        self._name = ""  # of a call
        self._scan = Scan()  # of the arguments of a call

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        text = self._held + text
        self._held = ""
        while text:
            marks = (MESSAGE,) if self._header else ENDS
            at, mark = min(((text.find(one), one) for one in marks if one in text), default=(-1, ""))
            if mark:
                header = self._header
                events += self._add(text[:at])
                if header and not self._header:  # it was no header: the marker is text
                    text = text[at:]
                    continue
                events += self._begin() if header else self._end()
                text = text[at + len(mark) :]
                continue
            keep = max(overlap(text, one) for one in marks)
            self._held, rest = text[len(text) - keep :], text[: len(text) - keep]
            return events + self._add(rest)
        return events

    def finish(self) -> list[Event]:
        events = self._add(self._held)
        self._held = ""
        if self._header:
            header = "".join(self._seen)
            return events + ([Event("content", header)] if header and START not in header else [])
        return events + self._end()

    def _add(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._header:
            self._seen.append(text)
            if not _may_be_header("".join(self._seen)):  # a model that does not write messages
                text, self._seen = "".join(self._seen), []
                self._header, self._kind = False, "content"
                return [Event("content", text)]
            return []
        if self._kind in ("call", "arguments"):
            return self._arguments(text)
        return [Event("reasoning" if self._kind == "reasoning" else "content", text)]

    def _arguments(self, text: str) -> list[Event]:
        """Pass the arguments of a call on; a message to a tool that is no JSON object is content."""
        events: list[Event] = []
        if self._kind == "call":
            text = text.lstrip()
            if not text:
                return []
            if text[0] != "{":
                self._kind = "content"
                return [Event("content", text)]
            self._kind, self._scan = "arguments", Scan()
            events.append(Event("call", self._name))
        elif self._scan.depth == 0:
            return []  # after the object
        return [*events, Event("arguments", text[: self._scan.to_depth(text, 0)])]

    def _begin(self) -> list[Event]:
        header = "".join(self._seen)
        self._header, self._seen = False, []
        channel = header.partition(CHANNEL)[2].strip()
        to = _TO.search(header)
        if to:
            self._kind, self._name = "call", to[1]
        else:
            self._kind = "reasoning" if channel.startswith("analysis") else "content"
        return []

    def _end(self) -> list[Event]:
        self._header = True
        return Call(self._name, "{}").events() if self._kind == "call" else []


def _may_be_header(text: str) -> bool:
    """Return whether text may be the header of a message: a role, a recipient and a channel."""
    text = text.lstrip()
    starts = (START, CHANNEL, "assistant", "analysis", "commentary", "final", "to=")
    return any(text.startswith((one[: len(text)], one)) for one in starts)


def gpt_oss(schemas: Schemas) -> Parser:
    """Return a parser of one output."""
    return Harmony()
