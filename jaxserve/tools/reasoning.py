"""Splits an output into its thinking and its answer, at the tags of the model's family."""

from __future__ import annotations

from jaxserve.tools.events import Event, Parser
from jaxserve.tools.marked import overlap

Tags = tuple[str, str]  # beginning and end of the thinking
THINK: Tags = ("<think>", "</think>")
MISTRAL: Tags = ("[THINK]", "[/THINK]")


class Thinking:
    """Reads one output. It begins to think if its prompt ends with the first tag, or if the output begins with it.

    Whitespace around the thinking belongs to neither part.
    """

    def __init__(self, tags: Tags, prompt: str) -> None:
        self._opening, self._closing = tags
        self._state = "thinking" if prompt.rstrip().endswith(self._opening) else "begin"
        self._held = ""
        self._trim = self._state == "thinking"  # drop whitespace at the beginning of a part
        self._space = ""  # at the end of the thinking so far

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        text, self._held = self._held + text, ""
        if self._state == "begin":
            text = self._begin(text)
        if self._state == "thinking" and text:
            at = text.find(self._closing)
            if at >= 0:
                events += self._reasoning(text[:at], last=True)
                self._state, self._trim, text = "answer", True, text[at + len(self._closing) :]
            else:
                keep = overlap(text, self._closing)
                self._held = text[len(text) - keep :]
                events += self._reasoning(text[: len(text) - keep])
        if self._state == "answer" and text:
            text = text.lstrip() if self._trim else text
            if text:
                self._trim = False
                events.append(Event("content", text))
        return events

    def finish(self) -> list[Event]:
        text, self._held = self._held, ""
        if self._state == "thinking":
            return self._reasoning(text, last=True)
        return [Event("content", text)] if text else []

    def _begin(self, text: str) -> str:
        """Find out whether the output begins with the first tag, and return the text that is left to read."""
        start = text.lstrip()
        if start.startswith(self._opening):
            self._state, self._trim = "thinking", True
            return start[len(self._opening) :]
        if self._opening.startswith(start):
            self._held = text
            return ""
        self._state = "answer"
        return text

    def _reasoning(self, text: str, last: bool = False) -> list[Event]:
        text = self._space + text
        text = text.lstrip() if self._trim else text
        kept = text.rstrip()
        self._space = "" if last else text[len(kept) :]
        if kept:
            self._trim = False
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
