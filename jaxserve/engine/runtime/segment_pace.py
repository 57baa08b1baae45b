"""When the next segment of a preemptible step is dispatched: just before the devices would wait for it.

A dispatched segment cannot be taken back, so a request to stop waits for all that are. If the host is late, the
devices are idle. Neither needs a number of segments: their times follow from those that have ended.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import inf

UNKNOWN = 2  # segments in flight while the time of one of them is not known
MOST = 8  # segments in flight: their activations are in memory
LATE = 1e-3  # seconds by which an event loop's timer wakes late
SLOW = 4e-3  # seconds of a dispatch that count: one that takes longer is an exception
RISE = 1.2  # a segment is predicted to take at most this times as long as the one of its kind before


class SegmentPace:
    """The pace of one instance. Writer: its executor, in the event loop.

    depth: this many segments are in flight, whatever time they take. For tests and comparisons; None: by their time.
    """

    def __init__(self, depth: int | None = None) -> None:
        self._depth = depth
        self._seconds: dict[Hashable, float] = {}  # predicted, of a segment by kind
        self._dispatch = 0.0  # moving average of the seconds that a dispatch takes
        self._late = 0.0  # how late the event loop was lately, in seconds

    @property
    def lead(self) -> float:
        """The seconds before the end of what is in flight at which the next segment is dispatched."""
        return LATE + 2 * self._dispatch + self._late

    def wait(self, flying: Sequence[Hashable], began: float, now: float) -> float:
        """Return the seconds until the next segment must be dispatched: 0 for now, inf for after the first one's end.

        flying: kinds of the segments in flight, of which the first began at `began`.
        """
        if self._depth is not None:
            return 0.0 if len(flying) < self._depth else inf
        if not flying:
            return 0.0
        if len(flying) >= MOST:
            return inf
        times = [self._seconds.get(kind) for kind in flying]
        known = [seconds for seconds in times if seconds is not None]
        if len(known) < len(times):
            return 0.0 if len(flying) < UNKNOWN else inf
        return max(0.0, began + sum(known) - now - self.lead)

    def dispatched(self, seconds: float) -> None:
        """Record how long a dispatch took."""
        self._dispatch += 0.1 * (min(seconds, SLOW) - self._dispatch)

    def woke(self, late: float) -> None:
        """Record how late the event loop called back."""
        self._late = max(late, 0.9 * self._late)

    def ended(self, kind: Hashable, seconds: float) -> None:
        """Record how long a segment took.

        One that took unusually long, because of other load, must not make the next ones late.
        """
        self._seconds[kind] = min(seconds, RISE * self._seconds.get(kind, inf))
