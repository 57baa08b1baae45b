"""A router chooses by snapshots as by live instances, and a front as a router that sees everything."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched import routing
from jaxserve.sched.api.policy import Role
from jaxserve.sched.instance.block_pool import next_digest
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.routing import ROUTERS
from jaxserve.sched.routing.base import Fleet
from jaxserve.sched.routing.front import Front
from jaxserve.sched.routing.prefix_index import KEPT
from jaxserve.sched.routing.snapshot import COLUMNS, Snapshot
from tests.support.examples import examples
from tests.support.sched.fleet import fleet, instance, request
from tests.support.sched.loaded import instances

M = Role.MIXED
ANY = instances(st.sampled_from(Role))


@given(
    name=st.sampled_from([*sorted(ROUTERS), "deflect:faster"]),
    others=st.lists(ANY, max_size=4),
    prompts=st.lists(st.integers(1, 900), min_size=1, max_size=3),
    identify=st.booleans(),
)
@settings(max_examples=examples(60), deadline=None)
def test_a_router_chooses_by_snapshots_as_by_live_instances(name, others, prompts, identify) -> None:  # type: ignore[no-untyped-def]
    live = [instance(M), instance(Role.DECODE), *others]
    seen = [Snapshot.of(one, 0.0, identify=identify) for one in live]
    routers = routing.make(name), routing.make(name)
    for id, tokens in enumerate(prompts):
        one = request(10_000_000 + id, tokens, 0.3)
        for router in routers:  # nothing is added to an instance, so what was sent before must not count
            if hasattr(router, "_sent"):
                router._sent._sent.clear()
        assert routers[0].prefill(one, fleet(live)) == routers[1].prefill(one, Fleet(0.0, seen, lambda tokens: 0.0))
        assert routers[0].decode(one, fleet(live)) == routers[1].decode(one, Fleet(0.0, seen, lambda tokens: 0.0))


@given(one=instances(st.just(M)), tokens=st.lists(st.integers(1, 900), min_size=1, max_size=3))
@settings(max_examples=examples(30), deadline=None)
def test_a_snapshot_plus_what_was_sent_is_a_snapshot_after_it_arrived(one: Scheduler, tokens: list[int]) -> None:
    sent = [request(10_000_000 + id, count, 0.3) for id, count in enumerate(tokens)]
    before = Snapshot.of(one, 0.0).plus(sent)
    for each in sent:
        one.add(each)
    after = Snapshot.of(one, 0.0)
    for name in ("waiting", "running", "prefill_backlog", "decode_context", "ends"):
        assert getattr(before, name) == getattr(after, name), name
    for name in COLUMNS:
        assert sorted(getattr(before.prefill, name)) == sorted(getattr(after.prefill, name)), name
    assert before.prefill.standard == after.prefill.standard and len(before) == len(after)


def test_a_snapshot_does_not_change_with_its_instance() -> None:
    one = instance(M)
    one.add(request(1, 100))
    taken = Snapshot.of(one, 0.0)
    kept = {each.name: getattr(taken, each.name) for each in fields(taken)}
    one.add(request(2, 100))
    one.plan(0.0, 0.0)
    assert kept == {each.name: getattr(taken, each.name) for each in fields(taken)}
    assert [each.id for each in taken] == [1] and taken.prefill.running.tolist() == [0.0] and len(taken) == 1


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_a_front_spreads_what_it_sends_before_it_hears_anything(name: str) -> None:
    front = Front(routing.make(name), [1] * 4)
    for at in range(4):
        front.update(at, {at: Snapshot.of(instance(M), 0.0)}, -1)
    chosen = []
    for mark in range(8):
        one = request(mark, 300)
        index = front.choose(one, 0.0)
        assert index is not None
        front.sent(index, one, mark)
        chosen.append(index)
    assert sorted(chosen) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_what_a_snapshot_shows_is_counted_once() -> None:
    front, one = Front(routing.make("least_work"), [1]), instance(M)
    front.update(0, {0: Snapshot.of(one, 0.0)}, -1)
    for mark in range(3):
        front.sent(0, request(mark, 100), mark)
    for id in range(2):
        one.add(request(id, 100))
    front.update(0, {0: Snapshot.of(one, 0.0)}, 1)
    shown = front.instance(0)
    assert shown is not None and shown.waiting == 3 and shown.prefill_backlog == 300


def test_a_front_leaves_out_groups_and_instances_that_do_not_accept() -> None:
    front, hung = Front(routing.make("least_work"), [2, 1]), instance(M)
    assert front.choose(request(0, 9), 0.0) is None, "nothing is known yet"
    front.update(0, {0: Snapshot.of(instance(M), 0.0), 1: Snapshot.of(instance(Role.DECODE), 0.0)}, -1)
    hung.hang(True)
    front.update(1, {2: Snapshot.of(hung, 0.0)}, -1)
    assert front.choose(request(0, 9), 0.0) == 0 and front.choose(request(0, 9), 0.0, [0]) is None
    front.forget(0)
    assert front.choose(request(0, 9), 0.0) is None


@given(holder=st.integers(0, 19), seed=st.integers(0, 99))
@settings(max_examples=examples(30), deadline=None)
def test_one_of_several_fronts_finds_the_longest_prefix_hit(holder: int, seed: int) -> None:
    front, one = Front(routing.make("least_work"), [1] * 20, page_size=16, fronts=4, seed=seed), request(1, 300)
    front.caches(holder, [next_digest(one, 16)[:KEPT] for _ in range(10)], ())
    for index in range(20):
        front.update(index, {index: Snapshot.of(instance(M), 0.0)}, -1)
    assert front.choose(one, 0.0) == holder
    others = {front.choose(request(id, 300), 0.0) for id in range(2, 40)}
    assert len(others) >= 10, "without a hit, it draws"


def test_a_longer_prefix_hit_is_that_of_another_group() -> None:
    front, one = Front(routing.make("least_work"), [2, 1, 1], page_size=16), request(1, 300)
    pages = [next_digest(one, 16)[:KEPT] for _ in range(12)]
    assert front.longer_hit(one, 0) is None
    front.caches(1, pages[:5], ())
    front.caches(2, pages[:3], ())
    assert front.longer_hit(request(1, 300), 3) == (1, 80) == front.longer_hit(request(1, 300), 2)
    assert front.longer_hit(request(1, 300), 0) is None, "the other instance of the group has more"
    front.caches(3, pages, ())
    assert front.longer_hit(request(1, 300), 1) == (3, 192)
    front.forget(2)
    assert front.longer_hit(request(1, 300), 1) is None


def ranked(name: str, one: Snapshot) -> int:
    """Return the number that a router ranks by first."""
    return one.prefill_backlog if name == "least_work" else 4 * one.waiting + one.running


@given(st.lists(ANY, min_size=6, max_size=9), st.integers(1, 900))
@settings(max_examples=examples(30), deadline=None)
def test_a_shortlist_has_the_best_by_the_numbers_that_a_router_ranks_by(live: list[Scheduler], tokens: int) -> None:
    """`least_work` and `fewest_requests` rank by numbers alone, so that a shortlist changes nothing."""
    for name in ("least_work", "fewest_requests"):
        wide, short = (Front(routing.make(name), [1] * len(live), shortlist=count) for count in (99, 5))
        for index, one in enumerate(live):
            for front in (wide, short):
                front.update(index, {index: Snapshot.of(one, 0.0)}, -1)
        choices = [front.choose(request(10_000_000, tokens), 0.0) for front in (wide, short)]
        shown = [None if at is None else wide.instance(at) for at in choices]
        assert (choices[0] is None) is (choices[1] is None)
        if shown[0] is not None and shown[1] is not None:
            assert ranked(name, shown[0]) == ranked(name, shown[1])
