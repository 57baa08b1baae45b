"""Where a model's thinking begins and ends, as sequences of tokens, and whether a prompt or an output is past it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Marker = tuple[int, ...]

STRETCH = 1024  # tokens of a prompt that are looked at together


class ThinkingEnd:
    """Finds the first end of thinking in tokens that come one at a time. Writer: the owner of one output.

    `seen` holds the latest tokens as far as they may be the beginning of a marker: it is all the state there is.
    """

    __slots__ = ("_beginnings", "_firsts", "markers", "seen")

    def __init__(self, markers: Sequence[Marker], seen: Sequence[int] = ()) -> None:
        self.markers = tuple(map(tuple, markers))
        self._firsts = frozenset(marker[0] for marker in self.markers)
        self._beginnings = frozenset(marker[:size] for marker in self.markers for size in range(1, len(marker)))
        self.seen: Marker = tuple(seen)

    def feed(self, token: int) -> bool:
        """Take the next token. Returns whether a marker ends with it."""
        if not self.seen and token not in self._firsts:
            return False
        tail = (*self.seen, token)
        suffixes = [tail[start:] for start in range(len(tail))]  # longest first
        ended = any(suffix in self.markers for suffix in suffixes)
        self.seen = next((suffix for suffix in suffixes if suffix in self._beginnings), ())
        return ended


@dataclass(frozen=True, slots=True)
class ThinkingMarkers:
    """The markers of one model: `opens` where it thinks or may begin to (a new turn too), `closes` where it answers.

    A model without `closes` does not think aloud.
    """

    opens: tuple[Marker, ...] = ()
    closes: tuple[Marker, ...] = ()

    def after(self, prompt: Sequence[int]) -> ThinkingEnd | None:
        """What finds the end of thinking in the output to `prompt`; None where the answer begins with its first token.

        The last marker of the prompt decides. Without one the output begins with thinking.
        """
        if not self.closes:
            return None
        by_last: dict[int, list[Marker]] = {}
        for marker in sorted({*self.opens, *self.closes}, key=len, reverse=True):
            by_last.setdefault(marker[-1], []).append(marker)
        for end in _ends(prompt, frozenset(by_last)):
            for marker in by_last[prompt[end - 1]]:
                if tuple(prompt[max(0, end - len(marker)) : end]) == marker:
                    return None if marker in self.closes else self._following(prompt)
        return self._following(prompt)

    def _following(self, prompt: Sequence[int]) -> ThinkingEnd:
        """A marker may begin in the prompt and end in the output."""
        made, most = ThinkingEnd(self.closes), max(map(len, self.closes))
        for token in prompt[max(0, len(prompt) - most + 1) :]:
            made.feed(token)
        return made


def _ends(prompt: Sequence[int], tokens: frozenset[int]) -> Iterator[int]:
    """Where one of these tokens ends, from the prompt's end on: most stretches of a long prompt hold none."""
    for high in range(len(prompt), 0, -STRETCH):
        low = max(0, high - STRETCH)
        if not tokens.isdisjoint(prompt[low:high]):
            yield from (end for end in range(high, low, -1) if prompt[end - 1] in tokens)
