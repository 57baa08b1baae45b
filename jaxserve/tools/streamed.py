"""Calls whose arguments are JSON as the model writes them: passed on as they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Sequence
from typing import NamedTuple

from jaxserve.tools.events import Event
from jaxserve.tools.scan import Scan, in_string

HEAD = 256  # characters in which a call must begin; then nothing more is passed on before the end
_NAMED = r'"name"\s*:\s*(?P<json>"(?:[^"\\]|\\.)+")\s*,\s*'


class Form(NamedTuple):
    """How a family writes its calls."""

    head: re.Pattern[str]  # from the end of the last call to the brace of the arguments; groups `name`, or `json`
    wrapped: bool  # the arguments are inside an object, which ends after them


def json_form(before: str = r"\s*", arguments: str = "arguments|parameters", first: str = "") -> Form:
    """Return the form {"name": ..., "arguments": {...}}.

    before: an expression for what stands before the object. first: one for the fields before the name.
    """
    return Form(re.compile(rf'{before}\{{\s*{first}{_NAMED}"(?:{arguments})"\s*:\s*(?=\{{)', re.DOTALL), True)


class CallStream:
    """Reads calls, one after another. Writer: one parser."""

    def __init__(self, forms: Sequence[Form], known: Container[str] | None = None, idle: str = r"[\s\],;}]*") -> None:
        """known: the names that calls may have; None: any. idle: an expression for what may follow the last call."""
        self._forms = forms
        self._known = known
        self._idle = idle
        self._held: list[str] = []  # text that belongs to no call
        self._size = 0  # of it
        self._form: Form | None = None  # of the call that is read
        self._scan = Scan()
        self.called = False

    @property
    def rest(self) -> str:
        """The text after the last call; all text if there is none."""
        return "".join(self._held)

    @property
    def matters(self) -> bool:
        """Whether the text after the last call is more than the end of a list."""
        return re.fullmatch(self._idle, self.rest) is None

    @property
    def inside(self) -> bool:
        """Whether the text ends inside a string."""
        return in_string(self.rest) if self._form is None else self._scan.inside

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if self._form is None:
                text = self._begin(text, events)
                continue
            outer = int(self._form.wrapped)
            arguments = self._scan.depth > outer
            size = self._scan.to_depth(text, outer if arguments else 0)
            if arguments:
                events.append(Event("arguments", text[:size]))
            text = text[size:]
            if self._scan.depth == 0:
                self._form = None
        return events

    def _begin(self, text: str, events: list[Event]) -> str:
        """Hold text back until a call begins, and return what follows from the brace of its arguments on."""
        wide = self._size >= HEAD  # no call begins here
        self._held.append(text)
        self._size += len(text)
        if wide:
            return ""
        self._held = [held] = ["".join(self._held)]
        for form in self._forms:
            found = form.head.match(held[:HEAD])
            name = None if found is None else _name(found)
            if found is None or name is None or not (self._known is None or name in self._known):
                continue
            events.append(Event("call", name))
            self._held, self._size, self.called = [], 0, True
            self._form, self._scan = form, Scan(int(form.wrapped) + 1)
            events.append(Event("arguments", "{"))
            return held[found.end() + 1 :]
        return ""


def _name(found: re.Match[str]) -> str | None:
    groups = found.groupdict()
    if (plain := groups.get("name")) is not None:
        return plain
    try:
        name = json.loads(groups["json"])
    except ValueError:
        return None
    return str(name)
