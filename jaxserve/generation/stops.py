"""Where the text of an output ends or begins to matter: at stop strings, and at the tags around its thinking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from jaxserve.tools.reasoning import opened
from jaxserve.tools.scan import Automaton, Finder


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
        self._end = Finder(Automaton(thinking.closings))
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
        self._finder = Finder(stops if isinstance(stops, Automaton) else Automaton(stops))
        self._include = include

    def add(self, text: str) -> tuple[str, str | None]:
        """Return the text to emit, and the stop string found or None; do not call again after one is found."""
        out, stop, _ = self._finder.read(text, 0)
        return out + stop * self._include, stop or None

    def flush(self) -> str:
        """Return the text that was held back, and reset the state."""
        return self._finder.rest()
