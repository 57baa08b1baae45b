"""Where a step of prompt chunks may stop: what users write, what the engine cuts, and what a simulation cuts.

The engine (jaxserve/engine/programs/segments.py, executor.py) and the simulated one (sim/latency.py) both take their
numbers from here, so that the simulator stops steps as they are stopped when served.
"""

from __future__ import annotations

from typing import NamedTuple

from .errors import InvalidValue

PARTS = 2  # of a layer at `op`: attention with its projections; feed-forward or experts
DEPTH = 2  # segments that the devices have been given and not finished, the running one included
SHORT = 512  # tokens: a step padded to fewer is over sooner than the host can do much about it, and runs as a whole
WHOLE = SHORT // 4  # tokens of the largest such step, as sizes of programs grow by 4


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

    def segments(self, layers: int) -> int:
        """Pieces of a step of a model with so many layers."""
        if not self.layers:
            return 1
        return -(-layers // self.layers) * (PARTS if self.operators else 1)


def stopping(segments: int, depth: int = DEPTH) -> float:
    """The largest share of a step of so many segments that still runs after it was asked to stop."""
    return min(1.0, depth / segments)
