"""Parsers of calls between two markers; a family says what stands between them."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.tools.events import Call, Event, Markers
from jaxserve.tools.streamed import CallStream

Reader = Callable[[str], list[Call] | None]


class Content:
    """The text outside of calls, without the whitespace next to them. Writer: one parser."""

    def __init__(self) -> None:
        self._space = ""  # held back: it is dropped if a call follows
        self._called = False
        self._fresh = True  # nothing but whitespace since the last call

    def add(self, text: str) -> list[Event]:
        """Return the content that is certain."""
        text = self._space + text
        if self._called and self._fresh:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._fresh = self._fresh and not kept
        return [Event("content", kept)] if kept else []

    def calls(self, events: list[Event]) -> list[Event]:
        """Return the events of calls; the whitespace before them is dropped."""
        if events:
            self._space, self._called, self._fresh = "", True, True
        return events

    def finish(self) -> list[Event]:
        """Return the whitespace at the end."""
        text, self._space = self._space, ""
        return [Event("content", text)] if text and not self._called else []


class Marked:
    """Finds calls between markers (a `Parser`). A block without a call that can be read is content."""

    def __init__(
        self, markers: Markers, read: Reader, json: bool = True, stream: Callable[[], CallStream] | None = None
    ) -> None:
        """Return a parser of one output.

        read: returns the calls in a block, or None. json: a closing marker inside a JSON string does not close.
        stream: makes what passes calls on before the end of a block; `read` gets what it leaves over.
        """
        self._opening, self._closing = markers
        self._read = read
        self._json = json
        self._make = stream or (lambda: CallStream(()))
        self._content = Content()
        self._held = ""  # text that may begin a marker
        self._stream: CallStream | None = None  # of the block that is read

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if self._stream is None:
                made, text = self._outside(text)
            else:
                made, text = self._inside(self._stream, text)
            events += made
        return events

    def finish(self) -> list[Event]:
        text, self._held = self._held, ""
        if self._stream is None:
            return self._content.add(text) + self._content.finish()
        events = self._content.calls(self._stream.feed(text)) + self._close(self._stream, "")
        return events + self._content.finish()

    def _outside(self, text: str) -> tuple[list[Event], str]:
        text = self._held + text
        at = text.find(self._opening)
        if at >= 0:
            self._held, self._stream = "", self._make()
            return self._content.add(text[:at]), text[at + len(self._opening) :]
        keep = overlap(text, self._opening)
        self._held = text[len(text) - keep :]
        return self._content.add(text[: len(text) - keep]), ""

    def _inside(self, stream: CallStream, text: str) -> tuple[list[Event], str]:
        text = self._held + text
        at = text.find(self._closing) if self._closing else -1
        if at < 0:
            keep = overlap(text, self._closing)
            self._held = text[len(text) - keep :]
            return self._content.calls(stream.feed(text[: len(text) - keep])), ""
        self._held, rest = "", text[at + len(self._closing) :]
        events = self._content.calls(stream.feed(text[:at]))
        if self._json and stream.inside:
            return events + self._content.calls(stream.feed(self._closing)), rest
        return events + self._close(stream, self._closing), rest

    def _close(self, stream: CallStream, closing: str) -> list[Event]:
        """End a block: what was passed on stays a call, and the rest is calls that can be read now, or content."""
        self._stream = None
        rest = stream.rest
        if stream.called and not stream.matters:
            return []
        calls = self._read(rest)
        if calls:
            return self._content.calls([event for call in calls for event in call.events()])
        return self._content.add(rest if stream.called else self._opening + rest + closing)


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that begins `marker`, and is not all of it."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
