"""Each router's choice among hand-made schedulers, and rerouting that loses no request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched import routing
from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.request import State
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.routing import unified as under_test
from jaxserve.sched.routing.base import Fleet, Move
from tests.support.examples import examples
from tests.support.sched.fleet import decodes, fleet, instance, request
from tests.support.sched.harness import Job
from tests.support.sched.harness import simulate as serve

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED
ROLES = (P, P, D, D)


@pytest.mark.parametrize("name", ["least_work", "unified", "deflect", "fewest_requests", "prefill_budget"])
def test_on_an_idle_fleet_the_first_instance_is_chosen(name: str) -> None:
    assert routing.make(name).prefill(request(0, 100), fleet([instance(role) for role in ROLES])) == [0, 1]


def test_decodes_go_to_the_instance_with_the_least_context() -> None:
    instances = [instance(role) for role in (P, D, D, D)]
    decodes(instances[1], 100, 500)
    decodes(instances[3], 101, 100)
    for name in ("least_work", "unified", "deflect", "prefill_budget", "next_replica"):
        assert routing.make(name).decode(request(0, 50), fleet(instances)) == [2, 3, 1]


def test_round_robin_rotates_for_prefill_and_decode() -> None:
    router, all_ = routing.make("round_robin"), fleet([instance(role) for role in (P, P, P, D, D)])
    assert [router.prefill(request(id, 9), all_) for id in range(4)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]
    assert [router.decode(request(id, 9), all_) for id in range(3)] == [[3, 4], [4, 3], [3, 4]]


def test_unified_counts_the_time_until_a_prompt_is_done() -> None:
    """The time includes the running step, which has no tokens left to plan, and the waiting requests."""
    instances = [instance(P), instance(P), instance(P)]
    instances[0].set_ends(0.05)
    instances[1].add(request(10, 20))
    instances[2].set_ends(0.01)
    assert routing.make("least_work").prefill(request(0, 100), fleet(instances)) == [0, 2, 1]
    assert routing.make("unified").prefill(request(0, 100), fleet(instances)) == [2, 1, 0]


def test_fewest_requests_counts_requests_whatever_their_length() -> None:
    instances = [instance(P), instance(P)]
    instances[0].add(request(10, 3))
    instances[0].add(request(11, 3))
    instances[1].add(request(12, 5000))
    assert routing.make("fewest_requests").prefill(request(0, 100), fleet(instances)) == [1, 0]


def busy(role: Role, *tokens: int, due: float = 8.0) -> Scheduler:
    one = instance(role)
    for id, length in enumerate(tokens, 50):
        one.add(request(id, length, due))
    return one


def test_deflect_if_faster_and_slo_only_if_the_slo_requires_it() -> None:
    """Through the prefill instance: 4 + 1 s and two steps; on the idle decode instance: 1 s and a step."""
    faster, slo = routing.make("deflect:faster"), routing.make("deflect:slo")
    instances = [busy(P, 4000), instance(D)]
    assert faster.prefill(request(0, 1000, ttft=8.0), fleet(instances)) == [1, 0]
    assert slo.prefill(request(0, 1000, ttft=8.0), fleet(instances)) == [0]
    assert slo.prefill(request(0, 1000, ttft=5.1), fleet(instances)) == [0]
    assert slo.prefill(request(0, 1000, ttft=4.9), fleet(instances)) == [1, 0]
    assert slo.prefill(request(0, 1000, ttft=0.9), fleet(instances)) == [0]  # the decode path would miss it too
    assert routing.make("deflect").prefill(request(0, 1000, ttft=4.9), fleet(instances)) == [1, 0]  # slo


def test_deflect_dropped_reroutes_a_late_prompt_that_can_be_on_time_elsewhere() -> None:
    """1.0 + 0.5 + 0.5 s of work due in 1.8 s: the longest would be late, and an idle decode instance can take it."""
    dropped, instances = routing.make("deflect:dropped"), [busy(P, 1000, 500, 500, due=1.8), instance(D)]
    assert dropped.prefill(request(0, 1000), fleet(instances)) == [0]
    [move] = dropped.redirect(fleet(instances))
    assert move[:3] == (50, 0, 1) and move.ends == pytest.approx(1.01)
    assert not dropped.redirect(fleet([busy(P, 1000, 500, due=1.8), instance(D)]))  # all are on time
    assert not dropped.redirect(fleet([busy(P, 1700, 500, due=1.8), instance(D)]))  # 1.71 s exceed 0.9 x 1.8 s
    assert not dropped.redirect(fleet([busy(P, 3000, 500, due=1.8), instance(D)]))  # hopeless anywhere
    assert not routing.make("deflect:slo").redirect(fleet(instances))


@pytest.mark.parametrize(
    ("reserve", "tokens", "elsewhere", "moved"),
    [  # 1 ms a token and 10 ms a step; all are due in 2 s; which request moves, and when it ends
        (0.3, (1200, 900, 600), (), (50, 1.21)),  # 2.7 s of work in 1.4 s: the longest, within 1.4 s
        (0.5, (1200, 900, 600), (), (51, 0.91)),  # within 1 s elsewhere
        (0.9, (1200, 900, 600), (), None),  # none ends within 0.2 s
        (0.0, (800, 700), (), None),  # all are on time
        (0.5, (800, 700), (), (50, 0.81)),  # not in half of the time, which is left to prompts to come
        (0.3, (1200, 900, 600), (1000,), (52, 0.61)),  # 1 s of work in 1.75 s: longer ones would make it late
        (0.3, (1200, 900, 600), (1000, 600), None),  # this one too
    ],
)
def test_unified_moves_the_longest_prompt_that_another_instance_gains(
    reserve: float, tokens: tuple[int, ...], elsewhere: tuple[int, ...], moved: tuple[int, float] | None
) -> None:
    unified = routing.make(f"unified:reserve={reserve}")
    other = instance(P)
    for id, length in enumerate(elsewhere, 80):
        other.add(request(id, length, 2.5))
    instances = [busy(P, *tokens, due=2.0), other]
    moves = [(move.request, pytest.approx(move.ends)) for move in unified.redirect(fleet(instances))]
    assert moves == ([] if moved is None else [moved])
    assert not unified.redirect(fleet(instances))  # nothing has changed since


@pytest.mark.parametrize(("tpot", "moves"), [(0.05, True), (0.009, False)])
def test_unified_moves_no_prompt_to_decodes_that_leave_it_no_time(tpot: float, moves: bool) -> None:
    """A step of the one row takes 11 ms, and one with prompts at most 1.2 of its TPOT."""
    late, decoding = busy(P, 100, 100, 100), instance(D)
    late.set_ends(7.0)  # of 8 s
    decodes(decoding, 90, 50, tpot=tpot)
    assert bool(routing.make("unified").redirect(fleet([late, decoding]))) is moves


def test_shorter_requests_pass_one_that_waits_for_pages_until_it_decodes_in_place() -> None:
    unified, instances = routing.make("unified"), [instance(P), instance(D, rows=2)]
    long, short = (request(id, tokens, ttft=8.0) for id, tokens in enumerate((5000, 100)))
    for waiting in (long, short):
        waiting.computed, waiting.state = waiting.prompt_length, State.TRANSFERRING
        waiting.token_times.append(0.0)

    def seen(now: float) -> tuple[bool, bool]:
        """Return whether the short one goes first, and whether the long one decodes in place."""
        at = Fleet(now, instances, lambda tokens: 0.0)
        ranks = [unified.decode_priority(waiting, at) for waiting in (long, short)]
        return ranks[1] < ranks[0], unified.decode_in_place(long, 0, at)

    assert seen(7.9) == (True, False)
    assert seen(8.1) == (False, True), "it has waited as long as its TTFT"
    long.token_times.clear()
    assert seen(8.1) == (False, True), "its first token is held, and late"
    decodes(instances[1], 10, 50)
    decodes(instances[1], 11, 50)
    assert seen(7.9) == seen(8.1) == (False, False), "slots are scarce: in the order of arrival"


@given(
    prompts=st.lists(
        st.tuples(st.integers(1, 60), st.floats(0, 0.02), st.sampled_from([0.003, 0.01, 1.0])), max_size=12
    ),
    name=st.sampled_from(["deflect:dropped", "unified:reserve=0", "unified"]),
    roles=st.sampled_from([(P, D), (P, P, D, D), (M, M)]),
)
@settings(max_examples=examples(30))
def test_only_waiting_requests_are_rerouted_and_none_is_lost(prompts, name, roles) -> None:  # type: ignore[no-untyped-def]
    moved: list[int] = []

    class Recorded(type(routing.make(name))):  # type: ignore[misc]
        def redirect(self, fleet: Fleet) -> Sequence[Move]:
            moves = super().redirect(fleet)
            for move in moves:
                [one] = [each for each in fleet.instances[move.source] if each.id == move.request]
                assert one.state is State.WAITING and not one.computed and not one.output and move.source != move.target
            assert len({move.request for move in moves}) == len(moves)
            moved.extend(move.request for move in moves)
            return list(moves)

    made = routing.make(name)
    made.__class__ = Recorded
    jobs = [
        Job(range(1000 * id, 1000 * id + length), 5, arrival, SLO(ttft, 0.01))
        for id, (length, arrival, ttft) in enumerate(prompts)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "make", lambda *names: made)
        outcome = serve(jobs, roles, policy="sedf", pages=40)
    assert [len(one.output) for one in outcome.requests] == [5] * len(jobs)


def test_unified_looks_at_prompts_that_nothing_takes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait, sets of prompts that are on time are only built for instances, and anew after a move."""
    sets, build = list[int](), under_test.on_time_set

    def counted(*given: Any) -> Any:
        sets.append(0)
        return build(*given)

    monkeypatch.setattr(under_test, "on_time_set", counted)
    for instances, most in ((1, 0), (3, 6)):
        lengths = [1500 + 100 * (at % 3) for at in range(200)]
        several = [busy(P, *lengths, due=2.0) for _ in range(instances)]
        sets.clear()
        assert not routing.make("unified").redirect(fleet(several))
        assert len(sets) == most
