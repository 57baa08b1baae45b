"""Readers of text that examine each character a bounded number of times, however the text arrives.

The parsers of outputs read with nothing else, so that no output costs them more than linear time.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
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


class Automaton:
    """Texts to find in a stream, with constant work per character (Aho and Corasick, CACM 1975). Immutable.

    A trie with failure links; its states are nodes, 0 is the root. A request may have 64 stop strings of 1,024
    characters, and n outputs, which share it: its tables are arrays, 24 bytes per character of the texts.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        """Build the trie, then the failure links by depth, in linear time and memory."""
        self._character = array("i", [0])  # on the edge from the parent
        self._child = array("i", [0])  # first child; 0: none
        self._sibling = array("i", [0])  # next child of the same parent; 0: none
        self._fail = array("i", [0])  # node of the longest proper suffix that starts a text
        self._longest = array("i", [0])  # length of the longest text that ends here; 0: none
        self.depth = array("i", [0])  # characters from the root: how much may start a text
        texts = list(filter(None, texts))
        for text in texts:
            self._insert(text)
        self._link()
        firsts = {text[0] for text in texts}
        self._first = None if len(firsts) > 1 else "".join(firsts)  # with which all of them begin; "" without any

    def _insert(self, text: str) -> None:
        node = 0
        for character in map(ord, text):
            child = self._find(node, character)
            if not child:
                child = len(self._child)
                self._character.append(character)
                self._child.append(0)
                self._sibling.append(self._child[node])
                self._fail.append(0)
                self._longest.append(0)
                self.depth.append(self.depth[node] + 1)
                self._child[node] = child
            node = child
        self._longest[node] = self.depth[node]

    def _link(self) -> None:
        waiting = deque([0])
        while waiting:
            node = waiting.popleft()
            child = self._child[node]
            while child:
                if node:
                    self._fail[child] = self.step(self._fail[node], self._character[child])
                self._longest[child] = self._longest[child] or self._longest[self._fail[child]]
                waiting.append(child)
                child = self._sibling[child]

    def _find(self, node: int, character: int) -> int:
        """Return the child along `character`; 0 if there is none."""
        child = self._child[node]
        while child and self._character[child] != character:
            child = self._sibling[child]
        return child

    def step(self, state: int, character: int) -> int:
        """Return the state after one more character."""
        while True:
            child = self._find(state, character)
            if child or not state:
                return child
            state = self._fail[state]

    def scan(self, state: int, text: str, start: int = 0) -> tuple[int, int, int]:
        """Read `text` from `start` up to the first end of one of the texts.

        Returns the state, where that ends, and the length of the longest text that ends there (0: none).
        """
        at = start
        while at < len(text):
            if not state and self._first is not None:
                at = text.find(self._first, at) if self._first else -1
                if at < 0:
                    break
            state = self.step(state, ord(text[at]))
            at += 1
            if self._longest[state]:
                return state, at, self._longest[state]
        return state, len(text), 0


class Found(NamedTuple):
    """The text before a mark, the mark or "", and where the mark ends."""

    text: str
    mark: str
    end: int


class Finder:
    """Finds the marks of an automaton in text that arrives in pieces. Writer: one parser."""

    def __init__(self, marks: Automaton) -> None:
        self._marks = marks
        self._state = 0
        self._held = ""  # it may begin a mark

    def read(self, text: str, start: int) -> Found:
        """Read `text` from `start` to the end of the first mark; without one, hold back what may begin one."""
        state, end, length = self._marks.scan(self._state, text, start)
        seen = self._held + text[start:end]
        cut = len(seen) - (length or self._marks.depth[state])
        self._state, self._held = (0, "") if length else (state, seen[cut:])
        return Found(seen[:cut], seen[cut:] if length else "", end)

    def rest(self) -> str:
        """Return what was held back, and hold it no more."""
        held, self._state, self._held = self._held, 0, ""
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
