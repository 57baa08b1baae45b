"""Splits an output into its thinking and its answer, at the tags of the model's family."""

from __future__ import annotations

from jaxserve.tools.events import Event, Parser
from jaxserve.tools.pattern import SPACE, Match, Pattern, text
from jaxserve.tools.scan import Finder, Marks, Trim

Tags = tuple[str, str]  # beginning and end of the thinking
THINK: Tags = ("<think>", "</think>")
MISTRAL: Tags = ("[THINK]", "[/THINK]")


class Thinking:
    """Reads one output. It begins to think if its prompt ends with the first tag, or if the output begins with it.

    Whitespace around the thinking belongs to neither part.
    """

    def __init__(self, tags: Tags, prompt: str) -> None:
        opening, closing = tags
        self._state = "thinking" if prompt.rstrip().endswith(opening) else "begin"
        self._begin = Match(Pattern((SPACE, text(opening))))
        self._held: list[str] = []  # while it may begin with the first tag
        self._end = Finder(Marks(closing))
        self._part = Trim(True)  # the thinking
        self._trim = False  # drop whitespace at the beginning of the answer

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        at = 0
        if self._state == "begin":
            at = self._begin.read(text, 0)
            self._held.append(text[:at])
            if self._begin.which is not None:
                self._state, self._held = "thinking", []
            elif self._begin.failed:
                self._state, text, at = "answer", "".join(self._held) + text[at:], 0
        if self._state == "thinking" and at < len(text):
            before, mark, at = self._end.read(text, at)
            events += self._reasoning(before)
            if mark:
                self._state, self._trim = "answer", True
        if self._state == "answer" and at < len(text):
            text = text[at:].lstrip() if self._trim else text[at:]
            if text:
                self._trim = False
                events.append(Event("content", text))
        return events

    def finish(self) -> list[Event]:
        if self._state == "thinking":
            return self._reasoning(self._end.rest())
        text, self._held = "".join(self._held) if self._state == "begin" else "", []
        return [Event("content", text)] if text else []

    def _reasoning(self, text: str) -> list[Event]:
        kept = self._part.add(text)
        return [Event("reasoning", kept)] if kept else []


class Plain:
    """Reads an output that is all content."""

    def feed(self, text: str) -> list[Event]:
        return [Event("content", text)] if text else []

    def finish(self) -> list[Event]:
        return []


class Chain:
    """Reads the content that the first parser finds with the second."""

    def __init__(self, first: Parser, second: Parser) -> None:
        self._first, self._second = first, second

    def feed(self, text: str) -> list[Event]:
        return self._through(self._first.feed(text))

    def finish(self) -> list[Event]:
        return [*self._through(self._first.finish()), *self._second.finish()]

    def _through(self, events: list[Event]) -> list[Event]:
        made: list[Event] = []
        for event in events:
            made += self._second.feed(event.text) if event.kind == "content" else [event]
        return made
