"""`unified` on views and clusters small enough to say what it must do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.sched.api.policy import Limits, Role, Task
from jaxserve.sched.api.request import BEST_EFFORT, Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.policies.unified import Unified
from jaxserve.sched.sim import Arrival, Mesh, simulate
from jaxserve.sched.sim.options import Options
from tests.support.sched.latency import LATENCY, TRUTH
from tests.support.sched.views import begun, decoding, prompt, view

# a second per 1,000 prompt tokens, 10 ms a step; see test_policies.PERF
LIMITS = Limits(8192, 256, 1000, 16, preemptible=True)


def granted(decision: object) -> list[int]:
    return [grant.request for grant in decision.grants]  # type: ignore[attr-defined]


def settled(one: Request) -> Request:
    """A row that has decoded ten tokens since it came."""
    one.output, one.computed = [*one.output, *range(10)], one.computed + 10
    return one


def test_the_prompt_with_the_most_work_loses_its_place_and_only_those_on_time_share_a_step() -> None:
    """Eight seconds for 5 + 2 + 2 seconds of work: without the longest the others are on time."""
    at = view([prompt(0, 5000), prompt(1, 2000), prompt(2, 2000)], [], limits=LIMITS)
    decision = Unified(ageing=0.0, pack=1.0).decide(at)
    assert granted(decision) == [1, 2]
    assert decision.demote == ()  # alone it could still be on time


def test_prompts_share_a_step_while_the_first_of_them_keeps_its_share_of_the_time() -> None:
    """1 + 2 s of work, due in 8: together they take less than half of it. A third makes it 5 s."""
    policy, two = Unified(ageing=0.0), [prompt(0, 1000), prompt(1, 2000)]
    assert policy.decide(view(two, [], limits=LIMITS)).prompts == 2
    assert policy.decide(view([*two, prompt(2, 2000)], [], limits=LIMITS)).prompts == 2
    soon = prompt(3, 1000, slo=SLO(ttft=2.0))
    decision = policy.decide(view([*two, soon], [], limits=LIMITS))
    assert granted(decision)[0] == 3 and decision.prompts == 1


def test_who_would_be_late_behind_the_others_rides_in_a_short_step_with_them() -> None:
    """20 ms each and 30 together, where 35 are left; not 40, and not where the other has less."""

    def step(*others: Request) -> list[int]:
        decision = Unified().decide(replace(view([prompt(0, 10, slo=SLO(0.035)), *others], [], limits=LIMITS), now=1.0))
        assert decision.prompts == len(decision.grants)
        return granted(decision)

    assert step(prompt(1, 10, slo=SLO(0.035))) == [0, 1]
    assert step(prompt(1, 20, slo=SLO(0.035))) == [0]
    assert step(prompt(1, 15, slo=SLO(0.036)), prompt(2, 10, slo=SLO(0.036))) == [0, 2]
    assert step(prompt(1, 10, tier=BEST_EFFORT)) == [0]


def test_what_cannot_be_on_time_any_more_becomes_best_effort_and_comes_last() -> None:
    late, able = prompt(0, 6000, slo=SLO(ttft=4.0)), prompt(1, 2000)
    decision = Unified(ageing=0.0).decide(view([late, able], [], limits=LIMITS))
    assert granted(decision) == [1] and decision.demote == (0,)


def test_who_holds_pages_goes_on_where_those_on_time_may_get_none() -> None:
    """Otherwise an instance whose pages are held by late prompts would stand still."""
    late, able = begun(prompt(0, 6000, slo=SLO(ttft=4.0)), 100), prompt(1, 2000)
    decision = Unified(ageing=0.0).decide(view([late, able], [], limits=LIMITS))
    assert granted(decision) == [1, 0] and decision.prompts == 1  # they do not share a step
    running = begun(prompt(2, 2000), 100)
    assert granted(Unified(ageing=0.0).decide(view([late, able, running], [], limits=LIMITS))) == [1, 2]
    aged = Unified(ageing=0.1).decide(view([prompt(3, 9000), begun(prompt(1, 2000), 100)], [], limits=LIMITS))
    assert granted(aged) == [3, 1] and aged.prompts == 1


def test_a_prompt_that_may_not_lose_its_place_stays_in_the_set() -> None:
    long = prompt(0, 70_000, slo=SLO(ttft=75.0))
    short = [prompt(one, 4000, slo=SLO(ttft=75.0)) for one in range(1, 4)]
    at = view([long, *short], [], limits=replace(LIMITS, tokens=100_000))
    assert granted(Unified(protect=0.0, ageing=0.0).decide(at)) == [1, 2, 3]
    kept = granted(Unified(protect=1.0, ageing=0.0, pack=1.0).decide(at))
    assert 0 in kept and len(kept) == 2


def test_ageing_gives_the_oldest_late_prompt_its_share_of_the_time() -> None:
    old = prompt(0, 6000, slo=SLO(ttft=1.0), tier=BEST_EFFORT)
    able = prompt(1, 2000, arrival=1.0)
    policy = Unified(ageing=0.1)  # the first 2 s of every 20
    assert granted(policy.decide(view([old, able], [], limits=LIMITS, now=20.5, start=20.5)))[0] == 0
    fresh = prompt(2, 2000, arrival=24.0)
    assert granted(policy.decide(view([old, fresh], [], limits=LIMITS, now=24.0, start=24.0))) == [2]


def test_a_late_step_stops_for_who_can_be_on_time_and_one_on_time_does_not() -> None:
    policy = Unified()
    late, able = prompt(0, 6000, tier=BEST_EFFORT), prompt(1, 2000)
    at = view([able], [], limits=LIMITS)
    assert policy.decide(replace(at, running=Task(1, (late,), 5.0))).preempt
    assert not policy.decide(replace(at, running=Task(1, (begun(prompt(2, 6000), 6000),), 5.0))).preempt
    assert not Unified(preempt=False).decide(replace(at, running=Task(1, (late,), 5.0))).preempt
    full = replace(at, limits=replace(LIMITS, suspended=1))
    assert not policy.decide(replace(full, running=Task(1, (late,), 5.0))).preempt


def test_a_step_on_time_makes_way_where_more_are_on_time_for_it_and_goes_on_in_its_turn() -> None:
    """5 s are left of it, due at 8. Who takes 2 s and is due at 3 is on time before it, and not behind it."""
    running = Task(1, (begun(prompt(0, 6000), 6000),), 5.0)
    soon, later = prompt(1, 2000, slo=SLO(ttft=3.0)), prompt(2, 2000, slo=SLO(ttft=9.0))
    policy = Unified(ageing=0.0)
    assert policy.decide(replace(view([soon], [], limits=LIMITS), running=running)).preempt
    assert not policy.decide(replace(view([later], [], limits=LIMITS), running=running)).preempt
    stopped = view([soon], [], limits=LIMITS, suspended=(running,))
    assert granted(policy.decide(stopped)) == [1]
    assert policy.decide(replace(stopped, prefill=view([later], []).prefill)).resume == 1


def test_a_suspended_step_goes_on_when_nobody_can_be_on_time() -> None:
    late = prompt(0, 6000, tier=BEST_EFFORT)
    at = view([], [], limits=LIMITS, suspended=(Task(7, (late,), 2.0),))
    assert Unified().decide(at).resume == 7
    assert Unified(ageing=0.0).decide(replace(at, prefill=view([prompt(1, 100)], []).prefill)).resume is None


def test_decoding_leaves_out_the_longest_where_the_joint_step_is_too_slow_and_not_for_ever() -> None:
    """10 ms + 1 ms per 1,000 tokens of the longest row: 60,000 tokens make 70 ms, above 50."""
    rows = [decoding(0, 1000, due=1.0, last=-0.01), decoding(1, 60_000, due=1.0, last=-0.01)]
    at = view([], rows, role=Role.DECODE, limits=LIMITS)
    assert granted(Unified().decide(at)) == [0]
    waited = [rows[0], decoding(1, 60_000, due=1.0, last=-0.2)]
    assert granted(Unified().decide(view([], waited, role=Role.DECODE, limits=LIMITS))) == [0, 1]
    assert granted(Unified().decide(replace(at, kv_waiting=1))) == [0, 1]


def test_a_guest_gets_what_the_rows_leave() -> None:
    """0.95 x 50 ms less 11 ms for the row: 36 prompt tokens at 1 ms each are below a grid of 64; 20 tokens fit."""
    row = settled(decoding(0, 1000, due=0.01))
    guest = prompt(1, 20)
    decision = Unified().decide(view([guest], [row], role=Role.DECODE, limits=LIMITS))
    assert [(grant.request, grant.tokens) for grant in decision.grants] == [(0, 1), (1, 20)]
    big = Unified().decide(view([prompt(1, 64)], [row], role=Role.DECODE, limits=LIMITS))
    assert granted(big) == [0]


def test_a_row_that_joined_late_has_short_steps_until_it_is_on_time() -> None:
    """Due in 10 ms, which the row needs for itself, the next in 60: two steps of 29 ms make up for it and leave 18."""
    late, guest = decoding(0, 1000, due=0.01), prompt(1, 32)
    assert granted(Unified().decide(view([guest], [late], role=Role.DECODE, limits=LIMITS))) == [0]
    assert granted(Unified().decide(view([prompt(1, 18)], [late], role=Role.DECODE, limits=LIMITS))) == [0, 1]
    at = view([guest], [settled(late)], role=Role.DECODE, limits=LIMITS)
    assert granted(Unified().decide(at)) == [0, 1]


def test_rows_that_joined_behind_a_long_step_decode_alone_where_nobody_else_is_late_for_it() -> None:
    """A step of both takes 70 ms, for the row of 60,000 tokens; the one that joined is due in 40 and takes 11 alone."""
    joined, policy = decoding(0, 1000, due=0.04), Unified(decode_share=2.0)  # which leaves nobody out

    def steps(*rows: Request, role: Role = Role.DECODE) -> list[int]:
        return granted(policy.decide(view([], list(rows), role=role, limits=LIMITS)))

    long = settled(decoding(1, 60_000, due=9.0))
    assert steps(joined, long) == [0]
    assert steps(joined, long, role=Role.MIXED) == [0, 1]
    assert steps(joined, settled(decoding(1, 60_000, due=0.075))) == [0, 1]  # it would be late behind such a step
    assert steps(decoding(0, 1000, due=-0.1), long) == [0, 1]  # neither this token nor the next would be on time
    others = [settled(decoding(2 + one, 1000, due=9.0)) for one in range(9)]
    assert steps(joined, long, *others[:6]) == [0]
    assert len(steps(joined, long, *others)) == 11  # 10 came in a second, and 110 ms of it would be theirs


def test_where_prompts_come_to_steps_are_as_short_as_they_can_wait_for() -> None:
    """A TTFT of 30 ms, 11 of them for their own prompts: a step may take 18. Rows of 1,000, 15,000 and 7,000 tokens
    take 11, 25 and 17; the last is due first. Where one of the others cannot skip the step all decode."""
    rows = [settled(decoding(0, 1000, 9.0)), settled(decoding(1, 15_000, 3.0)), settled(decoding(2, 7000, 2.0))]
    for row in rows:
        row.slo, row.prompt_length = SLO(ttft=0.03, tpot=0.05), 1
    at = view([], rows, role=Role.MIXED, limits=LIMITS)
    assert granted(Unified().decide(at)) == [2]
    assert granted(Unified().decide(replace(at, role=Role.DECODE))) == [0, 1, 2]
    rows[1].budget = rows[2].budget = 0.1
    assert granted(Unified().decide(view([], rows, role=Role.MIXED, limits=LIMITS))) == [0, 1, 2]


def test_a_suspended_step_goes_on_beside_rows_that_have_the_time() -> None:
    late, policy = prompt(0, 6000, tier=BEST_EFFORT), Unified(ageing=0.1)
    stopped = (Task(7, (late,), 2.0),)
    ahead, soon = settled(decoding(1, 1000, due=3.0)), settled(decoding(1, 1000, due=1.0))
    for row, now, resumed in ((ahead, 5.0, 7), (soon, 5.0, None), (soon, 0.0, 7)):  # the first 2 s of 20 are for it
        row.budget += now
        row.token_times = [now]
        at = view([], [row], role=Role.MIXED, limits=LIMITS, suspended=stopped, now=now, start=now)
        assert policy.decide(at).resume == resumed, (now, resumed)


def test_no_new_guest_comes_where_prompts_computed_elsewhere_wait_for_pages() -> None:
    row, guest = settled(decoding(0, 1000, due=0.01)), prompt(1, 20)
    at = view([guest], [row], role=Role.DECODE, limits=LIMITS)
    assert granted(Unified().decide(at)) == [0, 1]
    assert granted(Unified().decide(replace(at, kv_waiting=1))) == [0]
    started = view([begun(prompt(1, 20), 10)], [row], role=Role.DECODE, limits=LIMITS)
    assert granted(Unified().decide(replace(started, kv_waiting=1))) == [0, 1]


def test_beside_decoding_prompts_are_on_time_at_the_speed_that_is_left() -> None:
    """Steps of 75 ms, 1.5 tpot, of which decoding takes 11: 3.9 s of work take 4.6, and 4 s are too few."""
    row = decoding(0, 1000, due=0.1)
    tight = prompt(1, 3900, slo=SLO(ttft=4.0))
    short = prompt(2, 40, slo=SLO(ttft=9.0))
    policy = Unified(share=1.5)
    at = view([tight, short], [row], role=Role.DECODE, limits=LIMITS)
    assert granted(policy.decide(at)) == [0, 2]
    assert policy.decide(at).demote == ()  # the row may end
    assert granted(policy.decide(replace(at, role=Role.PREFILL, decode=view([], []).decode)))[0] == 1


@pytest.mark.parametrize("routing", ["unified", "deflect:dropped"])
def test_what_one_instance_must_drop_is_on_time_on_another(routing: str) -> None:
    """Twelve prompts of 1 s each with 8 s: the prefill instance does 8, the decode instance the others."""
    arrivals = [Arrival(0.001 * one, 10_000, 2, SLO(ttft=8.5, tpot=0.05)) for one in range(12)]
    alone = simulate(arrivals, "unified", Mesh(2), LATENCY, options=Options(routing="least_work"))
    both = simulate(arrivals, "unified", Mesh(2), LATENCY, options=Options(routing=routing))
    assert round(alone.summary.ttft_attained * 12) == 8
    assert both.summary.ttft_attained > alone.summary.ttft_attained


@pytest.mark.parametrize("third", [0.0041, 0.013])
def test_prompts_that_meet_are_on_time_where_a_decode_instance_has_a_step_for_them(third: float) -> None:
    """Steps of 12 ms with 20 ms to the first token: the prefill instance has time for one, or for one behind it. The
    row of the first request decodes 500 tokens, in steps of 2 ms: the others are guests there, two in one step too."""
    first = Arrival(0.0, 100, 500, SLO(ttft=0.5, tpot=0.05))
    others = [Arrival(0.3 + at, 100, 2, SLO(ttft=0.020, tpot=0.05)) for at in (0.0, 0.004, third)]
    alone, both = (
        simulate([first, *others], "unified", Mesh(2), LATENCY, options=Options(routing=routing))
        for routing in ("least_work", "unified")
    )
    assert alone.summary.ttft_attained < 1.0
    assert both.summary.ttft_attained == 1.0 and both.deflections > 0


def test_rows_decode_where_the_prompt_that_waits_finds_no_slot() -> None:
    """The row has slack to skip a step for the prompt; there is no second slot, so nothing would run at all."""
    row = decoding(0, 1000, due=9.0)
    at = view([prompt(1, 5000)], [row], role=Role.MIXED, limits=replace(LIMITS, rows=1))
    assert granted(Unified().decide(at)) == [0]


def test_a_promised_gap_is_kept_beside_guests() -> None:
    """With a TBT of 60 ms nobody skips a step, and a step takes 27 ms at most: 16 tokens beside a row of 11 ms."""
    row = decoding(0, 1000, due=9.0, last=-0.02)
    row.slo = SLO(tpot=0.05, tbt=0.06)
    at = view([prompt(1, 16)], [row], role=Role.DECODE, limits=LIMITS, start=0.0)
    assert granted(Unified().decide(at)) == [0, 1]
    larger = view([prompt(1, 63)], [row], role=Role.DECODE, limits=LIMITS, start=0.0)
    assert granted(Unified().decide(larger)) == [0]


def test_prompts_find_rows_where_those_of_the_decode_instance_are_taken() -> None:
    """Four rows of 200 tokens each at 2.2 ms a token: 9 requests per second, and 14 come. Eight rows are enough."""
    arrivals = [Arrival(0.07 * one, 200, 200, SLO(ttft=0.5, tpot=0.01)) for one in range(100)]
    apart, both = (
        simulate(arrivals, "unified", Mesh(2), LATENCY, options=Options(routing=routing, rows=4))
        for routing in ("unified:no-change-roles", "unified")
    )
    assert apart.summary.attained < both.summary.attained


def test_mixed_instances_keep_the_tpot_beside_a_prompt_that_is_late_in_any_case() -> None:
    """A prompt of 3 s due in one computes beside rows whose joint steps take 4 of 5 ms: it gets what they leave."""
    quick = replace(LATENCY, coefficients=replace(TRUTH, prefill=1e-5))
    rows = [Arrival(0.1 * one, 18_000, 1500, SLO(ttft=9.0, tpot=0.005)) for one in range(4)]
    late = Arrival(2.0, 300_000, 2, SLO(ttft=1.0, tpot=0.005))
    report = simulate([*rows, late], "unified", Mesh(1), quick)
    assert [one.attained for one in report.measured] == [True] * 4 + [False]


def test_no_prompt_moves_to_where_the_last_rows_are_for_those_computed_elsewhere() -> None:
    """Six prompts that meet, of 22 ms each with 30: the decode instance computes one, unless its rows are taken. Nobody
    is held back for rows it does not need: with 40 of them the same 19 requests decode, and prompts move."""
    first = [Arrival(0.03 * one, 100, 2000, SLO(ttft=0.5, tpot=0.05)) for one in range(19)]
    meet = [Arrival(0.9, 200, 2, SLO(ttft=0.03, tpot=0.05)) for _ in range(6)]
    full, free = (
        simulate([*first, *meet], "unified", Mesh(2), LATENCY, options=Options(routing="unified", rows=rows))
        for rows in (20, 40)
    )
    assert full.deflections == 0 < free.deflections
