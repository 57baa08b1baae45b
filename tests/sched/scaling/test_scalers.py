"""Scalers, the number of replicas over time, and which replicas start, serve on and drain."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched import scaling
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.policy import Role
from jaxserve.sched.scaling.base import Arrivals, Arriving, Target
from jaxserve.sched.scaling.changes import Standing, changes
from tests.support.examples import examples
from tests.support.sched.fleet import decodes, fleet, instance, request

NEEDS = st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20)), min_size=1, max_size=40)  # seconds later, need


@settings(max_examples=examples(200), deadline=None)
@given(NEEDS, st.floats(0, 100), st.integers(1, 4), st.integers(0, 8))
def test_the_number_is_the_highest_need_of_the_hold_within_bounds(
    needs: list[tuple[float, float]], hold: float, least: int, more: int
) -> None:
    target, now, past = Target(least, least + more, hold), 0.0, []
    for later, need in needs:
        now += later
        past.append((now, need))
        whole = max(need for at, need in past if at >= now - hold)
        assert target.at(now, need) == min(least + more, max(least, -int(-whole // 1)))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("nothing", "'nothing'; choose one of budget, requests"),
        ("budget:target=0", "target=0"),
        ("budget:target=1.5", "target=1.5"),
        ("requests:target=0", "target=0"),
        ("budget:x=1", "x"),
    ],
)
def test_an_unknown_scaler_or_option_is_an_error_that_names_it(text: str, named: str) -> None:
    with pytest.raises(InvalidValue, match=named):
        scaling.make(text)


@pytest.mark.parametrize(("least", "most", "hold"), [(0, 1, 1.0), (3, 2, 1.0), (1, 1, -1.0)])
def test_bad_bounds_are_an_error(least: int, most: int, hold: float) -> None:
    with pytest.raises(InvalidValue, match=r"least|hold"):
        Target(least, most, hold)


def test_budget_rises_with_prompts_with_decodes_and_with_arrivals() -> None:
    by_budget, quiet, busy = scaling.make("budget"), Arrivals(), Arrivals()
    idle = [instance(Role.MIXED), instance(Role.MIXED)]
    assert by_budget.needed(fleet(idle), quiet) == pytest.approx(0.0, abs=1e-6)
    for id in range(20):
        busy.add(request(id, 2000), now=0.0)
    arriving = by_budget.needed(fleet(idle), busy)
    assert arriving > 0
    idle[0].add(request(100, 4000))
    waiting = by_budget.needed(fleet(idle), busy)
    assert waiting > arriving
    for id in range(200, 210):
        decodes(idle[1], id, 500)
    assert by_budget.needed(fleet(idle), busy) > waiting


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.integers(1, 8000), max_size=12), st.integers(1, 4))
def test_the_need_does_not_depend_on_how_many_replicas_are_idle(lengths: list[int], more: int) -> None:
    by_budget, arrivals = scaling.make("budget"), Arrivals()
    ones = [instance(Role.MIXED)]
    for id, length in enumerate(lengths):
        one = request(id, length)
        ones[0].add(one)
        arrivals.add(one, now=0.0)
    few = by_budget.needed(fleet(ones), arrivals)
    assert by_budget.needed(fleet(ones + [instance(Role.MIXED) for _ in range(more)]), arrivals) == pytest.approx(few)


def test_requests_counts_unfinished_requests() -> None:
    ones = [instance(Role.MIXED), instance(Role.MIXED)]
    for id in range(12):
        ones[id % 2].add(request(id, 100))
    assert scaling.make("requests:target=4").needed(fleet(ones), Arrivals()) == 3.0


def test_arrivals_are_averaged_and_fade() -> None:
    arrivals = Arrivals()
    for at in range(200):
        arrivals.add(request(at, 500, ttft=3.0), now=at / 2)
    assert arrivals.rate(99.5) == pytest.approx(1000, rel=0.3)
    assert arrivals.ttft == pytest.approx(3.0) and arrivals.prompt == pytest.approx(500, rel=0.01)
    assert arrivals.rate(1000.0) < 1


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
