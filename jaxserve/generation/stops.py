"""Stop strings as one automaton (Aho and Corasick, CACM 1975), with constant work per character.

A request may have 64 stop strings of 1,024 characters, and n outputs. The automaton is built once
per request and shared by its outputs; each output has a cursor. Its tables are arrays: 24 bytes per
character of the stop strings.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from jaxserve.tools.reasoning import opened
from jaxserve.tools.scan import Finder, Marks


class Automaton:
    """A trie of the stop strings with failure links; its states are nodes, 0 is the root. Immutable."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Build the trie, then the failure links by depth, in linear time and memory."""
        self._character = array("i", [0])  # on the edge from the parent
        self._child = array("i", [0])  # first child; 0: none
        self._sibling = array("i", [0])  # next child of the same parent; 0: none
        self._fail = array("i", [0])  # node of the longest proper suffix that starts a stop string
        self._longest = array("i", [0])  # length of the longest stop string that ends here; 0: none
        self.depth = array("i", [0])  # characters from the root: how much of the text may start a stop string
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        node = 0
        for character in map(ord, stop):
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

    def scan(self, state: int, text: str) -> tuple[int, int, int]:
        """Read `text` up to the first end of a stop string.

        Returns the state, the characters read, and the length of the longest stop string that ends there (0: none).
        """
        for read, character in enumerate(text, 1):
            state = self.step(state, ord(character))
            if self._longest[state]:
                return state, read, self._longest[state]
        return state, len(text), 0


class Thinking(NamedTuple):
    """How the outputs of a request think: spellings of both tags, and whether their prompt ends with the first tag."""

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    begun: bool


def thinking_of(tags: tuple[tuple[str, ...], tuple[str, ...]] | None, prompt: str) -> Thinking | None:
    """Return how the outputs after a prompt think; None without tags."""
    return None if tags is None else Thinking(*tags, prompt.rstrip().endswith(tags[0]))


class Thoughts:
    """Separates the thinking at the beginning of an output, with its tags, from the answer.

    An output thinks if its prompt ends with the first tag, or if it begins with it, as `Parser`s read it.
    """

    def __init__(self, thinking: Thinking) -> None:
        self.state: Literal["unknown", "thinking", "answer"] = "thinking" if thinking.begun else "unknown"
        self._begin = opened(thinking.openings)
        self._end = Finder(Marks(*thinking.closings))
        self._held: list[str] = []  # while it may begin with the first tag

    def add(self, text: str) -> tuple[str, str]:
        """Return the text of the thinking and that of the answer."""
        if self.state == "unknown":
            at = self._begin.read(text, 0)
            self._held.append(text[:at])
            if not self._begin.decided:
                return "", ""
            begun, text = self.flush(), text[at:]
            if self._begin.failed:
                self.state = "answer"
                return "", begun + text
            self.state = "thinking"
            thinking, answer = self.add(text)
            return begun + thinking, answer
        if self.state == "answer":
            return "", text
        _, mark, end = self._end.read(text, 0)  # only the answer waits for what may be a tag
        self.state = "answer" if mark else "thinking"
        return text[:end], text[end:]

    def flush(self) -> str:
        """Return the text that was held back."""
        held, self._held = "".join(self._held), []
        return held


class StopStrings:
    """Finds the first stop string in a stream of text, and holds back text that may start one."""

    def __init__(self, stops: Sequence[str] | Automaton, include: bool = False) -> None:
        """stops: an automaton, or stop strings. include: emit the stop string as text too."""
        if not isinstance(stops, Automaton):
            stops = Automaton(stops)
        self._automaton = stops
        self._include = include
        self._state = 0
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Return the text to emit, and the stop string found or None; do not call again after one is found."""
        self._state, read, length = self._automaton.scan(self._state, text)
        seen = self._held + text[:read]
        if length:
            out, self._held = seen if self._include else seen[:-length], ""
            return out, seen[-length:]
        cut = len(seen) - self._automaton.depth[self._state]
        out, self._held = seen[:cut], seen[cut:]
        return out, None

    def flush(self) -> str:
        """Return the text that was held back, and reset the state."""
        out, self._held, self._state = self._held, "", 0
        return out
