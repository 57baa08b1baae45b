"""Parsers of calls between two markers; a family says what stands between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxserve.tools.events import Call, Event, Markers
from jaxserve.tools.scan import Automaton, Cursor, Finder, Trim
from jaxserve.tools.streamed import NONE, CallStream

Reader = Callable[[Cursor], list[Call] | None]


class Content:
    """The text outside of calls, without the whitespace next to them, but with a gap between two texts.

    Writer: one parser.
    """

    def __init__(self) -> None:
        self._trim = Trim(False)  # the whitespace that it holds back is dropped if a call follows
        self._called = False
        self._said = False
        self._gap = ""  # between the text so far and the next

    def add(self, text: str) -> list[Event]:
        """Return the content that is certain."""
        kept = self._trim.add(text)
        if not kept:
            return []
        kept, self._gap, self._said = self._gap + kept, "", True
        return [Event("content", kept)]

    def calls(self, events: list[Event]) -> list[Event]:
        """Return the events of calls; the whitespace before them is dropped."""
        if events:
            if self._said:
                self._gap = self._gap or self._trim.rest() or " "
            self._called, self._trim = True, Trim(True)
        return events

    def finish(self) -> list[Event]:
        """Return the whitespace at the end."""
        text = self._trim.rest()
        return [Event("content", text)] if text and not self._called else []


class Marked:
    """Finds calls between markers (a `Parser`). A block without a call that can be read is content."""

    def __init__(
        self,
        markers: Markers,
        read: Reader,
        json: bool = True,
        stream: Callable[[], CallStream] | None = None,
        also: Sequence[str] = (),
    ) -> None:
        """Return a parser of one output.

        read: returns the calls in a block, or None. json: a closing marker inside a JSON string does not close.
        stream: makes what passes calls on before the end of a block; `read` gets what it leaves over.
        also: other opening markers.
        """
        self._markers = markers
        self._opening, self._closing = Automaton([markers.opening, *also]), Automaton([markers.closing])
        self._read = read
        self._json = json
        self._make = stream or (lambda: CallStream(NONE))
        self._content = Content()
        self._finder = Finder(self._opening)
        self._stream: CallStream | None = None  # of the block that is read
        self._opened = ""  # its opening marker

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        at = 0
        while at < len(text):
            before, mark, at = self._finder.read(text, at)
            if self._stream is None:
                events += self._content.add(before)
                if mark:
                    self._stream, self._finder, self._opened = self._make(), Finder(self._closing), mark
                continue
            events += self._content.calls(self._stream.feed(before))
            if mark and self._json and self._stream.inside:
                events += self._content.calls(self._stream.feed(mark))
            elif mark:
                events += self._close(self._stream, mark)
        return events

    def finish(self) -> list[Event]:
        text = self._finder.rest()
        if self._stream is None:
            return self._content.add(text) + self._content.finish()
        events = self._content.calls(self._stream.feed(text)) + self._close(self._stream, "")
        return events + self._content.finish()

    def _close(self, stream: CallStream, closing: str) -> list[Event]:
        """End a block: what was passed on stays a call, and the rest is calls that can be read now, or content."""
        self._stream, self._finder = None, Finder(self._opening)
        left = stream.left()
        if left is None:
            return []
        rest = left.rest
        if stream.called and not self._markers.closing:
            rest = rest.removeprefix("]")  # of a list that lasts to the end of the output
        calls = self._read(left)
        if calls:
            return self._content.calls([event for call in calls for event in call.events()])
        return self._content.add(rest if stream.called else self._opened + rest + closing)
