"""Where a step of prompt chunks may stop, as users write it."""

from __future__ import annotations

from typing import NamedTuple

from .errors import InvalidValue


class Boundary(NamedTuple):
    """A step stops behind every so many layers, or within them too."""

    layers: int  # 0: only at the step's end
    operators: bool = False

    @classmethod
    def parse(cls, text: str) -> Boundary:
        """`op`, `layer`, `layers:K` or `chunk`. Raises InvalidValue."""
        plain = {"chunk": cls(0), "layer": cls(1), "op": cls(1, operators=True)}
        if text in plain:
            return plain[text]
        word, _, count = text.partition(":")
        if word != "layers" or not count.isdecimal() or int(count) < 1:
            raise InvalidValue(f"preempt_boundary={text!r} must be op, layer, layers:K or chunk", "preempt_boundary")
        return cls(int(count))
