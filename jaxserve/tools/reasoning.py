"""Splits an output into its thinking and its answer, at the tags of the model's family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.tools.events import Event, Parser
from jaxserve.tools.pattern import SPACE, Match, Pattern, text
from jaxserve.tools.scan import Automaton, Finder, Trim


class Tags(NamedTuple):
    """The texts that begin and end a part of an output, each in every spelling of the family. Immutable."""

    openings: tuple[str, ...]
    closings: tuple[str, ...]


THINK = Tags(("<think>",), ("</think>",))
MISTRAL = Tags(("[THINK]",), ("[/THINK]",))
# Granite 3.2 is told to write "Here is", and may write "Here's".
GRANITE = Tags(
    ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
)
RESPONSE = Tags(("<response>",), ("</response>",))  # around the answer of Granite 3.3 after its thinking


class Thinking:
    """Reads one output. It begins to think if its prompt ends with the first tag, or if the output begins with it.

    Whitespace around the thinking belongs to neither part.
    """

    def __init__(self, tags: Tags, prompt: str, around: Tags | None = None) -> None:
        """around: tags of the answer after thinking, which are no part of it."""
        self._state = "thinking" if prompt.rstrip().endswith(tags.openings) else "begin"
        self._begin = opened(tags.openings)
        self._held: list[str] = []  # while it may begin with the first tag
        self._end = Finder(Automaton(tags.closings))
        self._part = Trim(True)  # the thinking
        self._trim = False  # drop whitespace at the beginning of the answer
        self._around = around
        self._answer: Parser = Plain()

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
                self._answer = Plain() if self._around is None else Inside(self._around)
        if self._state == "answer" and at < len(text):
            text = text[at:].lstrip() if self._trim else text[at:]
            if text:
                self._trim = False
                events += self._answer.feed(text)
        return events

    def finish(self) -> list[Event]:
        if self._state == "thinking":
            return self._reasoning(self._end.rest())
        text, self._held = "".join(self._held) if self._state == "begin" else "", []
        return [*self._answer.feed(text), *self._answer.finish()]

    def _reasoning(self, text: str) -> list[Event]:
        kept = self._part.add(text)
        return [Event("reasoning", kept)] if kept else []


class Plain:
    """Reads an output that is all content."""

    def feed(self, text: str) -> list[Event]:
        return [Event("content", text)] if text else []

    def finish(self) -> list[Event]:
        return []


class Inside:
    """Reads an answer between tags, and drops them with the whitespace inside; without the first it is all content."""

    def __init__(self, tags: Tags) -> None:
        self._begin = opened(tags.openings)
        self._held: list[str] = []  # while it may be the first tag
        self._end = Finder(Automaton(tags.closings))
        self._part = Trim(True)
        self._plain = False

    def feed(self, text: str) -> list[Event]:
        at = 0
        if not self._begin.decided:
            at = self._begin.read(text, 0)
            self._held.append(text[:at])
            if self._begin.failed:
                self._plain, text, at = True, "".join(self._held) + text[at:], 0
        if self._plain or not self._begin.decided:
            return _content(text[at:])
        content = ""
        while at < len(text):
            before, _, at = self._end.read(text, at)
            content += self._part.add(before)
        return _content(content)

    def finish(self) -> list[Event]:
        if self._plain:
            return []
        return _content(self._part.add(self._end.rest()) if self._begin.decided else "".join(self._held))


def opened(openings: Sequence[str]) -> Match:
    """Return what reads a text that begins with a tag, after whitespace."""
    return Match(Pattern(*((SPACE, text(opening)) for opening in openings)))


def _content(text: str) -> list[Event]:
    return [Event("content", text)] if text else []


class Chain:
    """Reads the content that the first parser finds with the second."""

    def __init__(self, first: Parser, second: Parser) -> None:
        self._first, self._second = first, second

    def feed(self, text: str) -> list[Event]:
        return self._through(self._first.feed(text))

    def finish(self) -> list[Event]:
        return [*self._through(self._first.finish()), *self._second.finish()]

    def _through(self, events: list[Event]) -> list[Event]:
        result: list[Event] = []
        for event in events:
            result += self._second.feed(event.text) if event.kind == "content" else [event]
        return result
