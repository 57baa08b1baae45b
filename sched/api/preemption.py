"""The boundaries at which a prefill step can stop.

The engine (jaxserve/engine/programs/segments.py, executor.py) and the simulator (sim/latency.py)
share these numbers, so that simulated steps stop where real ones do.
"""

from __future__ import annotations

from typing import NamedTuple

from .errors import InvalidValue

PARTS = 2  # segments per layer at `op`: attention with its projections; feed-forward or experts
LEAD = 2e-3  # seconds before the end of a segment at which the next one is dispatched, in the simulator
SHORT = 192  # tokens: a step padded to fewer ends before the host could stop it, so it is not segmented
SHORT_ON_CPU = 512  # the same on a CPU, where programs cost start-up time and each segment 0.5 ms or more
WHOLE = SHORT * 2 // 3  # tokens of the largest unsegmented step: the program size below SHORT


class Boundary(NamedTuple):
    """A boundary after every `layers` layers, and within them if `operators`."""

    layers: int  # 0: only at the end of the step
    operators: bool = False

    @classmethod
    def parse(cls, text: str) -> Boundary:
        """Parse `op`, `layer`, `layers:K` or `chunk`. Raises InvalidValue."""
        plain = {"chunk": cls(0), "layer": cls(1), "op": cls(1, operators=True)}
        if text in plain:
            return plain[text]
        word, _, count = text.partition(":")
        if word != "layers" or not count.isdecimal() or int(count) < 1:
            raise InvalidValue(f"preempt_boundary={text!r} must be op, layer, layers:K or chunk", "preempt_boundary")
        return cls(int(count))

    def segments(self, layers: int) -> int:
        """Return the number of segments of a step of a model with this many layers."""
        if not self.layers:
            return 1
        return -(-layers // self.layers) * (PARTS if self.operators else 1)


def stopping(segments: int) -> float:
    """Return the largest share of a step of this many equal segments that still runs after a request to stop.

    It is one segment. Up to the lead of its dispatch is left of the segment before, which policies count as time
    of the host.
    """
    return 1.0 / segments
