"""Readers of text that examine each character a bounded number of times, however the text arrives.

The parsers of outputs read with nothing else, so that no output costs them more than linear time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxserve.tools.events import DECODER


def in_name(character: str) -> bool:
    """Return whether names of tools have a character."""
    return character.isalnum() or character in "_.-"


class Scan:
    """Follows the strings and brackets of JSON. Writer: one parser."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth  # open brackets
        self.inside = False  # in a string
        self._escaped = False

    def to_depth(self, text: str, depth: int | None, start: int = 0) -> int:
        """Read `text` from `start` until a bracket closes that leaves `depth` open, and return where that ends.

        Without such a bracket, or with a depth of None, all is read.
        """
        for at in range(start, len(text)):
            character = text[at]
            if self._escaped:
                self._escaped = False
            elif self.inside:
                self._escaped, self.inside = character == "\\", character != '"'
            elif character == '"':
                self.inside = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth == depth:
                    return at + 1
        return len(text)


class Marks:
    """Texts to find, which begin with the same character, and none of which lies inside another. Immutable."""

    def __init__(self, *marks: str) -> None:
        self.marks = frozenset(mark for mark in marks if mark)
        self.first = next(iter(self.marks))[0] if self.marks else ""
        starts = {mark[:size] for mark in self.marks for size in range(len(mark))}
        self.after = {  # the longest end of (what was read, a character) that begins a mark
            (start, character): next(
                read[cut:] for cut in range(len(read) + 1) if read[cut:] in starts or read[cut:] in self.marks
            )
            for start in starts
            for character in {character for mark in self.marks for character in mark}
            for read in [start + character]
        }


class Found(NamedTuple):
    """The text before a mark, the mark or "", and where the mark ends."""

    text: str
    mark: str
    end: int


class Finder:
    """Finds marks in text that arrives in pieces. Writer: one parser."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._held = ""  # it may begin a mark

    def read(self, text: str, start: int) -> Found:
        """Read `text` from `start` to the end of the first mark; without one, hold back what may begin one."""
        marks, held, at = self._marks, self._held, start
        while at < len(text):
            if not held:
                at = text.find(marks.first, at) if marks.first else -1
                if at < 0:
                    at = len(text)
                    break
            held = marks.after.get((held, text[at]), "")
            at += 1
            if held in marks.marks:
                break
        seen = self._held + text[start:at]
        mark = held if held in marks.marks else ""
        self._held = "" if mark else held
        return Found(seen[: len(seen) - len(held)], mark, at)

    def rest(self) -> str:
        """Return what was held back, and hold it no more."""
        held, self._held = self._held, ""
        return held


class Trim:
    """Takes whitespace off the end of a text that arrives in pieces, and off its beginning. Writer: one parser."""

    def __init__(self, start: bool) -> None:
        """start: drop whitespace at the beginning."""
        self.start = start
        self._space: list[str] = []  # at the end so far

    def add(self, text: str) -> str:
        """Return the text that is certain."""
        text = text.lstrip() if self.start else text
        kept = text.rstrip()
        if kept:
            text, self.start = text[len(kept) :], False
            kept, self._space = "".join([*self._space, kept]), []
        if text:
            self._space.append(text)
        return kept

    def rest(self) -> str:
        """Return the whitespace at the end, and hold it no more."""
        space, self._space = "".join(self._space), []
        return space


class Cursor:
    """Reads a text once: every method moves to the end of what it has examined. Writer: one parser."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    @property
    def done(self) -> bool:
        """Whether all text is read."""
        return self.at >= len(self.text)

    @property
    def rest(self) -> str:
        """The text that is left."""
        return self.text[self.at :]

    def skip(self, also: str = "") -> None:
        """Skip whitespace and the characters of `also`."""
        text, at = self.text, self.at
        while at < len(text) and (text[at].isspace() or text[at] in also):
            at += 1
        self.at = at

    def word(self) -> str:
        """Skip the characters of a name and return them."""
        begun = at = self.at
        while at < len(self.text) and in_name(self.text[at]):
            at += 1
        self.at = at
        return self.text[begun:at]

    def take(self, mark: str) -> bool:
        """Skip `mark` and return True if it comes next."""
        taken = self.text.startswith(mark, self.at)
        self.at += len(mark) if taken else 0
        return taken

    def until(self, mark: str) -> tuple[str, bool]:
        """Return the text before `mark`, which is skipped, and True; all that is left and False without a mark."""
        begun, at = self.at, self.text.find(mark, self.at)
        self.at = len(self.text) if at < 0 else at + len(mark)
        return self.text[begun : len(self.text) if at < 0 else at], at >= 0

    def value(self) -> Any:
        """Return the value of the JSON that comes next; None, and all is read, if there is none."""
        try:
            value, self.at = DECODER.raw_decode(self.text, self.at)
        except (ValueError, RecursionError):
            self.at = len(self.text)
            return None
        return value
