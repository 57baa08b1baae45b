"""When segments are dispatched: the devices do not wait for the host, and a request to stop waits for little more than
the running segment."""

from __future__ import annotations

from collections import deque
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.runtime.segment_pace import LATE, MOST, RISE, SLOW, UNKNOWN, SegmentPace

DISPATCH = 3e-4  # seconds that the host takes to dispatch a segment


def walked(pace: SegmentPace, seconds: list[float], late: float) -> tuple[float, float]:
    """Run a step of segments; return the seconds in which the devices waited, and the most that a stop waits.

    seconds: of each segment, all of one kind. late: by which the host's timer wakes.
    """
    now = ends = idle = longest = 0.0
    flying: deque[tuple[float, float]] = deque()  # begin and end of each segment in flight
    for took in seconds:
        while (left := pace.wait(["kind"] * len(flying), flying[0][0] if flying else 0.0, now)) > 0.0:
            woken = min(now + max(left, 1e-9) + late, flying[0][1])
            if woken < flying[0][1]:
                pace.woke(late)
            now = woken
            while flying and flying[0][1] <= now:
                begun, ended = flying.popleft()
                pace.ended("kind", ended - begun)
        now += DISPATCH
        pace.dispatched(DISPATCH)
        idle += max(0.0, now - ends) if ends else 0.0
        begin = max(now, ends)
        ends = begin + took
        flying.append((begin, ends))
        longest = max(longest, ends - now - took)  # a stop asked for now waits for `took` and for this
    return idle, longest


@given(
    took=st.floats(3 * DISPATCH, 0.2),
    noise=st.lists(st.floats(1.0, RISE), min_size=4, max_size=64),
    late=st.floats(0.0, LATE),
)
def test_the_devices_wait_for_no_dispatch_and_a_stop_for_little(took: float, noise: list[float], late: float) -> None:
    pace = SegmentPace()
    walked(pace, [took] * 64, late)
    assert pace.lead <= 2 * LATE + 2 * DISPATCH
    idle, longest = walked(pace, [took * one for one in noise], late)
    # a prediction may be too long by the noise of the segments that are in flight
    assert idle <= (RISE - 1) * took * len(noise)
    assert longest <= pace.lead + (RISE - 1) * took * MOST
    even, most = walked(pace, [took] * 64, late)
    assert even <= 2 * (RISE - 1) * took + 1e-9 and most <= pace.lead + 1e-9


def test_segments_of_unknown_length_are_few() -> None:
    pace = SegmentPace()
    assert [pace.wait(["a"] * count, 0.0, 0.0) for count in range(UNKNOWN + 1)] == [0.0] * UNKNOWN + [inf]
    pace.ended("a", 0.5)
    assert pace.wait(["a"], 0.0, 0.2) == pytest.approx(0.3 - pace.lead)
    assert pace.wait(["a", "b"], 0.0, 0.2) == inf, "it may be short, but one of them is not known"
    pace.ended("b", 1e-6)
    assert pace.wait(["b"] * MOST, 0.0, 0.0) == inf
    assert pace.wait(["b"] * (MOST - 1), 0.0, 0.0) == 0.0


def test_one_slow_segment_or_dispatch_changes_little() -> None:
    pace = SegmentPace()
    pace.ended("a", 0.01)
    pace.ended("a", 3.0)
    assert pace.wait(["a"], 0.0, 0.0) == pytest.approx(RISE * 0.01 - pace.lead)
    pace.ended("a", 0.005)
    assert pace.wait(["a"], 0.0, 0.0) == pytest.approx(0.005 - pace.lead)
    pace.dispatched(2.0)
    assert pace.lead <= LATE + 2 * SLOW
    pace.woke(0.05)
    assert pace.lead >= 0.05
    for _ in range(60):
        pace.woke(0.0)
    assert pace.lead <= LATE + 2 * SLOW
