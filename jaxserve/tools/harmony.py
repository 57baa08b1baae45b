"""gpt-oss (harmony): messages with channels, for thinking, calls and the answer.

openai-harmony reads token ids of one vocabulary, which it downloads; here text is read, as in all other families.
"""

from __future__ import annotations

from jaxserve.tools.events import Call, Event
from jaxserve.tools.pattern import SPACE, Match, Pattern, either, text
from jaxserve.tools.scan import Automaton, Cursor, Finder, Scan

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
TO = "to="
HEADER = Pattern(
    (SPACE, text(MESSAGE)),
    (SPACE, either(*map(text, (START, CHANNEL, "assistant", "analysis", "commentary", "final", TO)))),
)
HEADED, ENDED = Automaton([MESSAGE]), Automaton(["<|end|>", "<|call|>", "<|return|>", START])


class Harmony:
    """Reads the messages of one output, which are reported as they arrive."""

    def __init__(self) -> None:
        self._kind = "content"
        self._name = ""  # of a call
        self._scan = Scan()  # of the arguments of a call
        self._await_header()

    def _await_header(self) -> None:
        self._header = True  # the text up to <|message|> is a header
        self._seen: list[str] = []  # of a header
        self._begins = Match(HEADER)
        self._finder = Finder(HEADED)

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        at = 0
        while at < len(text):
            if self._header and not self._begins.decided:
                end = self._begins.read(text, at)
                self._seen.append(text[at:end])
                at = end
                if self._begins.which == 0:
                    self._begin()
                elif self._begins.failed:  # a model that does not write messages
                    seen, self._kind = "".join(self._seen), "content"
                    self._await_end()
                    events += self._add(self._finder.read(seen, 0).text)
                continue
            before, mark, at = self._finder.read(text, at)
            if self._header:
                self._seen.append(before)
            else:
                events += self._add(before)
            if mark and self._header:
                self._begin()
            elif mark:
                events += self._end()
        return events

    def finish(self) -> list[Event]:
        text = self._finder.rest()
        if self._header:
            header = "".join([*self._seen, text])
            return [Event("content", header)] if header and not Cursor(header).until(START)[1] else []
        return self._add(text) + self._end()

    def _add(self, text: str) -> list[Event]:
        if not text:
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

    def _await_end(self) -> None:
        self._header, self._seen, self._finder = False, [], Finder(ENDED)

    def _begin(self) -> None:
        header = "".join(self._seen)
        self._await_end()
        to, channel = Cursor(header), Cursor(header)
        to.until(TO)
        to.take("functions.")
        self._name = to.word()
        channel.until(CHANNEL)
        channel.skip()
        self._kind = "call" if self._name else "reasoning" if channel.take("analysis") else "content"

    def _end(self) -> list[Event]:
        self._await_header()
        return Call(self._name, "{}").events() if self._kind == "call" else []
