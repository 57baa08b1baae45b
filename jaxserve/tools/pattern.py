"""Expressions that read text as it arrives, each character once: a set of states instead of backtracking."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxserve.tools.scan import in_name

Test = Callable[[str], bool]  # of a character
Part = Callable[["Pattern", int], int]  # adds states that lead to the given one, and returns the first of them


class Pattern:
    """Alternatives, each a sequence of parts. Immutable, but for what it remembers of ASCII."""

    def __init__(self, *alternatives: Sequence[Part]) -> None:
        self._moves: list[tuple[Test, int] | None] = []  # of each state: what it reads, and the next state
        self._free: list[list[int]] = []  # of each state: those that it leads to without a character
        self._ends: dict[int, int] = {}  # final state -> which alternative
        starts = []
        for which, parts in enumerate(alternatives):
            end = self.state()
            self._ends[end] = which
            starts.append(sequence(*parts)(self, end))
        self.start = self._closed(starts)
        self._known: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def state(self, test: Test | None = None, then: int = -1) -> int:
        """Add a state, which leads to `then` with a character that passes `test`."""
        self._moves.append(None if test is None else (test, then))
        self._free.append([])
        return len(self._moves) - 1

    def link(self, state: int, *then: int) -> None:
        """Let a state lead to others without a character."""
        self._free[state] += then

    def after(self, states: frozenset[int], character: str) -> frozenset[int]:
        """Return the states after one more character; none: nothing matches."""
        known = self._known.get((states, character))
        if known is None:
            moves = (move for state in states if (move := self._moves[state]) is not None)
            known = self._closed([then for test, then in moves if test(character)])
            if character.isascii():
                self._known[states, character] = known
        return known

    def matched(self, states: frozenset[int]) -> int | None:
        """Return the first alternative that has been read to its end."""
        return min((self._ends[state] for state in states if state in self._ends), default=None)

    def _closed(self, states: list[int]) -> frozenset[int]:
        closed, waiting = set(states), list(states)
        while waiting:
            more = [state for state in self._free[waiting.pop()] if state not in closed]
            closed.update(more)
            waiting += more
        return frozenset(closed)


class Match:
    """How far a text matches a pattern from its beginning on. Writer: one parser."""

    def __init__(self, pattern: Pattern, most: int | None = None) -> None:
        """most: characters that a match may have."""
        self._pattern = pattern
        self._states = pattern.start
        self._left = most
        self.which: int | None = None  # the alternative that has matched

    @property
    def decided(self) -> bool:
        """Whether it is certain that the text matches, or that it does not."""
        return self.which is not None or not self._states

    @property
    def failed(self) -> bool:
        """Whether the text cannot match any more."""
        return not self._states

    def fail(self) -> None:
        """Match nothing from now on."""
        self._states, self.which = frozenset(), None

    def read(self, text: str, start: int) -> int:
        """Read from `start` until it is certain whether the text matches, and return the end of what was read."""
        at = start
        while at < len(text) and not self.decided:
            if self._left == 0:
                self.fail()
                break
            self._states = self._pattern.after(self._states, text[at])
            self.which = self._pattern.matched(self._states)
            self._left = None if self._left is None else self._left - 1
            at += 1
        return at


def sequence(*parts: Part) -> Part:
    def build(pattern: Pattern, then: int) -> int:
        for part in reversed(parts):
            then = part(pattern, then)
        return then

    return build


def character(test: Test) -> Part:
    return lambda pattern, then: pattern.state(test, then)


def text(given: str) -> Part:
    return sequence(*(character(char.__eq__) for char in given))


def either(*parts: Part) -> Part:
    def build(pattern: Pattern, then: int) -> int:
        start = pattern.state()
        pattern.link(start, *(part(pattern, then) for part in parts))
        return start

    return build


def maybe(*parts: Part) -> Part:
    return either(sequence(*parts), sequence())


def many(part: Part) -> Part:
    """Return a part that reads another any number of times."""

    def build(pattern: Pattern, then: int) -> int:
        start = pattern.state()
        pattern.link(start, part(pattern, start), then)
        return start

    return build


SPACE = many(character(str.isspace))
WORD = character(in_name)
NAME = sequence(WORD, many(WORD))
QUOTED = either(character(lambda char: char not in '"\\'), sequence(text("\\"), character(lambda char: True)))
STRING = sequence(text('"'), QUOTED, many(QUOTED), text('"'))
