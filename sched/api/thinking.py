"""Detection of the begin and end of thinking, by marker token sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Marker = tuple[int, ...]

STRETCH = 1024  # prompt tokens per search block


class ThinkingEnd:
    """Incremental detector of the first end of thinking. Writer: the owner of the output.

    `seen`, the latest tokens that may be the beginning of a marker, is the whole state.
    """

    __slots__ = ("_beginnings", "_firsts", "markers", "seen")

    def __init__(self, markers: Sequence[Marker], seen: Sequence[int] = ()) -> None:
        self.markers = tuple(map(tuple, markers))
        self._firsts = frozenset(marker[0] for marker in self.markers)
        self._beginnings = frozenset(marker[:size] for marker in self.markers for size in range(1, len(marker)))
        self.seen: Marker = tuple(seen)

    def feed(self, token: int) -> bool:
        """Add the next token. Returns whether it completes a marker."""
        if not self.seen and token not in self._firsts:
            return False
        tail = (*self.seen, token)
        suffixes = [tail[start:] for start in range(len(tail))]  # longest first
        ended = any(suffix in self.markers for suffix in suffixes)
        self.seen = next((suffix for suffix in suffixes if suffix in self._beginnings), ())
        return ended


@dataclass(frozen=True, slots=True)
class ThinkingMarkers:
    """The thinking markers of a model.

    After a marker in `opens` (including the begin of a turn) the model thinks or may begin to;
    after one in `closes` it answers. A model without `closes` has no thinking stage.
    """

    opens: tuple[Marker, ...] = ()
    closes: tuple[Marker, ...] = ()
    starts: tuple[Marker, ...] = ()  # those of `opens` with which thinking itself begins
    header_end: int | None = None  # the token at which the text of an answer begins, if it has a header
    asks: tuple[Marker, ...] = ()  # instructions without which in its prompt no output thinks; (): none needed

    def after(self, prompt: Sequence[int]) -> ThinkingEnd | None:
        """Return the detector for the output to `prompt`, or None if the output begins with the answer.

        The last marker in the prompt decides. Without a marker the output begins with thinking.
        """
        if not self.closes or not self.asked(prompt):
            return None
        return None if self.last(prompt) in self.closes else self._following(prompt)

    def asked(self, prompt: Sequence[int]) -> bool:
        """Return whether an output to `prompt` may think."""
        return not self.asks or any(
            tuple(prompt[max(0, end - len(ask)) : end]) == ask
            for ask in self.asks
            for end in _ends(prompt, frozenset(ask[-1:]))
        )

    def last(self, prompt: Sequence[int]) -> Marker | None:
        """Return the last marker in a prompt, the longest of those that end there, or None."""
        by_last: dict[int, list[Marker]] = {}
        for marker in sorted({*self.opens, *self.closes}, key=len, reverse=True):
            by_last.setdefault(marker[-1], []).append(marker)
        for end in _ends(prompt, frozenset(by_last)):
            for marker in by_last[prompt[end - 1]]:
                if tuple(prompt[max(0, end - len(marker)) : end]) == marker:
                    return marker
        return None

    def _following(self, prompt: Sequence[int]) -> ThinkingEnd:
        """Return a detector primed with the end of the prompt: a marker may begin there and end in the output."""
        detector, most = ThinkingEnd(self.closes), max(map(len, self.closes))
        for token in prompt[max(0, len(prompt) - most + 1) :]:
            detector.feed(token)
        return detector


def _ends(prompt: Sequence[int], tokens: frozenset[int]) -> Iterator[int]:
    """Yield the positions after each of these tokens, last first.

    Searches block by block, because most blocks of a long prompt contain none of the tokens.
    """
    for high in range(len(prompt), 0, -STRETCH):
        low = max(0, high - STRETCH)
        if not tokens.isdisjoint(prompt[low:high]):
            yield from (end for end in range(high, low, -1) if prompt[end - 1] in tokens)
