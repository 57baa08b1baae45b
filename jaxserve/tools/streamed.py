"""Calls whose arguments are JSON as the model writes them: passed on as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from jaxserve.tools.events import Event
from jaxserve.tools.pattern import SPACE, STRING, Match, Part, Pattern, either, maybe, sequence, text
from jaxserve.tools.scan import Cursor, Scan

HEAD = 256  # characters in which a call must begin; then nothing more is passed on before the end
ENDS = "],;}"  # may follow the last call


class Form:
    """How a family writes its calls. Immutable."""

    def __init__(self, head: Sequence[Part], name: Callable[[Cursor], object], wrapped: bool) -> None:
        """head: from the end of the last call to the brace of the arguments. name: reads the name from a head.

        wrapped: the arguments are inside an object, which ends after them.
        """
        self.head = (*head, text("{"))
        self.name = name
        self.wrapped = wrapped


def json_form(before: Part = SPACE, *first: Part, arguments: Sequence[str] = ("arguments", "parameters")) -> Form:
    """Return the form {"name": ..., "arguments": {...}}.

    before: what may stand before the object. first: the fields before the name.
    """
    key = either(*(text(f'"{name}"') for name in arguments))
    colon, comma = sequence(SPACE, text(":"), SPACE), sequence(SPACE, text(","), SPACE)
    head = (before, text("{"), SPACE, *first, text('"name"'), colon, STRING, comma, key, colon)
    return Form(head, _json_name, True)


def _json_name(head: Cursor) -> object:
    head.until("{")
    value = Cursor("{" + head.rest + "0}").value()
    return value["name"] if isinstance(value, dict) else None


class Forms:
    """The forms of a family, of which the first that matches is read. Immutable."""

    def __init__(self, *forms: Form) -> None:
        self.forms = forms
        self.pattern = Pattern(*(form.head for form in forms))


class CallStream:
    """Reads calls, one after another. Writer: one parser."""

    def __init__(
        self,
        forms: Forms,
        known: Container[str] | None = None,
        idle: Callable[[Cursor], object] = lambda rest: rest.skip(ENDS),
    ) -> None:
        """known: the names that calls may have; None: any. idle: skips what may follow the last call."""
        self._forms = forms
        self._known = known
        self._idle = idle
        self._form: Form | None = None  # of the call that is read
        self.called = False
        self._restart()

    def _restart(self) -> None:
        self._held: list[str] = []  # text that belongs to no call
        self._head = Match(self._forms.pattern, HEAD)
        self._scan = Scan()  # of the call that is read; else of held text
        self._scanned = 0  # texts of those held

    @property
    def rest(self) -> str:
        """The text after the last call; all text if there is none."""
        return "".join(self._held)

    def left(self) -> Cursor | None:
        """Return the text after the last call, with its whitespace read, or all text; None: it only ends a list."""
        left = Cursor(self.rest)
        if self.called:
            left.skip()
            at = left.at
            self._idle(left)
            if left.done:
                return None
            left.at = at
        return left

    @property
    def inside(self) -> bool:
        """Whether the text ends inside a string."""
        if self._form is None:
            for held in self._held[self._scanned :]:
                self._scan.to_depth(held, None)
            self._scanned = len(self._held)
        return self._scan.inside

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        at = 0
        while at < len(text):
            if self._form is None:
                at = self._begin(text, at, events)
                continue
            outer = int(self._form.wrapped)
            arguments = self._scan.depth > outer
            end = self._scan.to_depth(text, outer if arguments else 0, at)
            if arguments:
                events.append(Event("arguments", text[at:end]))
            at = end
            if self._scan.depth == 0:
                self._form = None
                self._restart()
        return events

    def _begin(self, text: str, start: int, events: list[Event]) -> int:
        """Hold text back until a call begins, and return where its arguments go on after their brace."""
        end = len(text) if self._head.failed else self._head.read(text, start)
        self._held.append(text[start:end])
        if self._head.which is not None:
            form = self._forms.forms[self._head.which]
            name = form.name(Cursor(self.rest[:-1]))
            if not isinstance(name, str) or not (self._known is None or name in self._known):
                self._head.fail()
                return end
            events += [Event("call", name), Event("arguments", "{")]
            self._held, self.called = [], True
            self._form, self._scan = form, Scan(int(form.wrapped) + 1)
        return end


NONE = Forms()
OPTIONAL_TYPE = maybe(text('"type"'), SPACE, text(":"), SPACE, text('"function"'), SPACE, text(","), SPACE)
