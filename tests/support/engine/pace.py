"""A fixed number of segments in flight, for tests that stop steps at known places."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import inf

from jaxserve.engine.runtime.segment_pace import SegmentPace


class Depth(SegmentPace):
    """As `SegmentPace`, but `depth` segments are in flight, whatever time they take."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def wait(self, flying: Sequence[Hashable], began: float, now: float) -> float:
        return 0.0 if len(flying) < self.depth else inf
