"""Which replicas start, serve on and drain."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.scaling.base import Arrivals, Arriving
from jaxserve.sched.scaling.changes import Standing, changes
from tests.support.examples import examples

REPLICAS = st.lists(st.tuples(st.sampled_from(list(Standing)), st.integers(0, 9)), min_size=1, max_size=8)


@settings(max_examples=examples(300), deadline=None)
@given(REPLICAS, st.integers(1, 8))
def test_the_target_is_reached_or_nothing_more_can_start(replicas: list[tuple[Standing, int]], target: int) -> None:
    standing, requests = [one for one, _ in replicas], [count for _, count in replicas]
    made = changes(target, standing, requests)
    of = {what: {at for at, one in enumerate(standing) if one is what} for what in Standing}
    assert set(made.start) <= of[Standing.STOPPED] and set(made.resume) <= of[Standing.DRAINING]
    assert set(made.drain) <= of[Standing.SERVING] and not (made.drain and (made.start or made.resume))
    serving, coming = len(of[Standing.SERVING]), len(of[Standing.STARTING])
    assert serving - len(made.drain) >= min(serving, target)  # what starts does not stand in for what serves
    after = serving + coming + len(made.start) + len(made.resume) - len(made.drain)
    assert after >= (most := min(target, len(replicas)))
    assert after == most or not (made.start or made.resume)
    assert not made.start or len(made.resume) == len(of[Standing.DRAINING])  # these serve on first
    kept = of[Standing.SERVING] - set(made.drain)
    assert all(requests[at] <= requests[one] for at in made.drain for one in kept)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0.1, 9)), min_size=1, max_size=20), st.integers(1, 3))
def test_arrivals_of_several_engines_are_those_of_one(asked: list[tuple[int, float]], engines: int) -> None:
    whole, parts = Arrivals(), [Arrivals() for _ in range(engines)]
    for at, (prompt, ttft) in enumerate(asked):
        whole.count(prompt, ttft, now=at / 4)
        parts[at % engines].count(prompt, ttft, now=at / 4)
    now = len(asked) / 4
    total = Arriving.total([one.at(now) for one in parts])
    assert whole.rate(now) * 0.999 <= total.rate(now) <= engines * whole.rate(now) * 1.001
    assert min(ttft for _, ttft in asked) - 1e-9 <= total.ttft <= max(ttft for _, ttft in asked) + 1e-9
    assert Arriving.total([whole.at(now)]) == pytest.approx(whole.at(now))


def test_nothing_arrives_at_no_engine() -> None:
    assert Arriving.total([]) == Arriving() == Arriving.total([Arrivals().at(3.0)])
