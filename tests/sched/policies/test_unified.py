"""The `unified` policy on small views and clusters."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.policy import Limits, Role, Task
from jaxserve.sched.api.request import BEST_EFFORT, Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.policies.unified import Unified
from jaxserve.sched.sim import Arrival, Mesh, simulate
from jaxserve.sched.sim.options import Options
from tests.support.sched.latency import LATENCY, TRUTH
from tests.support.sched.views import begun, decoding, prompt, view

# 1 s per 1,000 prompt tokens and 10 ms a step; see test_policies.PERF
LIMITS = Limits(8192, 256, 1000, 16, preemptible=True)


def granted(decision: object) -> list[int]:
    return [grant.request for grant in decision.grants]  # type: ignore[attr-defined]


def settled(one: Request) -> Request:
    """Return the row after it has decoded ten tokens on this instance."""
    one.output, one.computed = [*one.output, *range(10)], one.computed + 10
    return one


def test_the_longest_prompt_leaves_the_on_time_set_and_only_on_time_prompts_share_a_step() -> None:
    """With 8 s for 5 + 2 + 2 s of work, the others are on time without the longest prompt."""
    at = view([prompt(0, 5000), prompt(1, 2000), prompt(2, 2000)], [], limits=LIMITS)
    decision = Unified(ageing=0.0, pack=1.0).decide(at)
    assert granted(decision) == [1, 2]
    assert decision.demote == ()  # alone it could still be on time


def test_an_otherwise_late_prompt_joins_a_short_step() -> None:
    """20 ms each and 30 ms together: join at 35 ms, but not at 40, nor if the other prompt has less time."""

    def step(*others: Request) -> list[int]:
        decision = Unified().decide(replace(view([prompt(0, 10, slo=SLO(0.035)), *others], [], limits=LIMITS), now=0.5))
        assert decision.prompts == len(decision.grants)
        return granted(decision)

    assert step(prompt(1, 10, slo=SLO(0.035))) == [0, 1]
    assert step(prompt(1, 20, slo=SLO(0.035))) == [0]
    assert step(prompt(1, 15, slo=SLO(0.036)), prompt(2, 10, slo=SLO(0.036))) == [0, 2]
    assert step(prompt(1, 10, tier=BEST_EFFORT)) == [0]


def test_a_heavy_prompt_stays_in_the_set_instead_of_lighter_ones() -> None:
    def chosen(weight: float) -> list[int]:
        long = prompt(0, 70_000, slo=SLO(ttft=75.0, weight=weight))
        short = [prompt(one, 4000, slo=SLO(ttft=75.0)) for one in range(1, 4)]
        at = view([long, *short], [], limits=replace(LIMITS, tokens=100_000))
        return granted(Unified(ageing=0.0, pack=1.0).decide(at))

    assert chosen(1.0) == chosen(17.0) == [1, 2, 3]
    kept = chosen(18.0)  # 70,000 tokens of weight 18 are less than 4,000 of weight 1
    assert 0 in kept and len(kept) == 2


def test_ageing_gives_the_oldest_late_prompt_its_share_of_the_time() -> None:
    old = prompt(0, 6000, slo=SLO(ttft=1.0), tier=BEST_EFFORT)
    able = prompt(1, 2000, arrival=1.0)
    policy = Unified(ageing=0.1)  # it takes some 6 s: the first 6 of every 60
    assert granted(policy.decide(view([old, able], [], limits=LIMITS, now=1.5, start=1.5)))[0] == 0
    fresh = prompt(2, 2000, arrival=24.0)
    assert granted(policy.decide(view([old, fresh], [], limits=LIMITS, now=24.0, start=24.0))) == [2]
    shares = [
        granted(policy.decide(view([old, prompt(2, 2000, arrival=at)], [], limits=LIMITS, now=at, start=at)))[0]
        for at in [step / 2 for step in range(1200)]
    ]
    assert shares.count(0) / len(shares) == pytest.approx(0.1, abs=0.01)


def test_an_on_time_step_yields_if_more_prompts_are_on_time_and_resumes_in_its_turn() -> None:
    """The running step has 5 s left, due in 8. A prompt of 2 s due in 3 is on time before it, but not after it."""
    running = Task(1, (begun(prompt(0, 6000), 6000),), 5.0)
    soon, later = prompt(1, 2000, slo=SLO(ttft=3.0)), prompt(2, 2000, slo=SLO(ttft=9.0))
    policy = Unified(ageing=0.0)
    assert policy.decide(replace(view([soon], [], limits=LIMITS), running=running)).preempt
    assert not policy.decide(replace(view([later], [], limits=LIMITS), running=running)).preempt
    stopped = view([soon], [], limits=LIMITS, suspended=(running,))
    assert granted(policy.decide(stopped)) == [1]
    assert policy.decide(replace(stopped, prefill=view([later], []).prefill)).resume == 1


def test_a_slow_joint_decode_step_leaves_out_the_longest_row_but_not_forever() -> None:
    """10 ms + 1 ms per 1,000 tokens of the longest row: 60,000 tokens make 70 ms, above 50."""
    rows = [decoding(0, 1000, due=1.0, last=-0.01), decoding(1, 60_000, due=1.0, last=-0.01)]
    at = view([], rows, role=Role.DECODE, limits=LIMITS)
    assert granted(Unified().decide(at)) == [0]
    waited = [rows[0], decoding(1, 60_000, due=1.0, last=-0.2)]
    assert granted(Unified().decide(view([], waited, role=Role.DECODE, limits=LIMITS))) == [0, 1]
    assert granted(Unified().decide(replace(at, kv_waiting=1))) == [0, 1], "its pages are waited for"
    late = view([], [decoding(0, 1000, due=0.05, last=-0.01), rows[1]], role=Role.DECODE, limits=LIMITS)
    assert granted(Unified().decide(replace(late, kv_waiting=1))) == [0], "with it the other would be late"


def test_a_piggybacked_prompt_gets_the_time_that_rows_leave() -> None:
    """0.95 x 50 ms less 11 ms for the row: 36 tokens at 1 ms each are below the grid of 64; 20 tokens fit."""
    row = settled(decoding(0, 1000, due=0.01))
    waiting = prompt(1, 20)
    decision = Unified().decide(view([waiting], [row], role=Role.DECODE, limits=LIMITS))
    assert [(grant.request, grant.tokens) for grant in decision.grants] == [(0, 1), (1, 20)]
    big = Unified().decide(view([prompt(1, 64)], [row], role=Role.DECODE, limits=LIMITS))
    assert granted(big) == [0]


def test_rows_without_a_tpot_skip_four_steps_of_all_rows_at_most() -> None:
    """Steps of all rows take 25 ms. The second row has no TPOT and can skip the steps of a prompt for 100 ms."""

    def steps(last: float) -> list[int]:
        rows = [settled(decoding(0, 1000, 9.0)), settled(decoding(1, 15_000, inf, last))]
        rows[1].slo = SLO(ttft=1.0, tpot=inf)
        return granted(Unified().decide(view([prompt(2, 48)], rows, role=Role.MIXED, limits=LIMITS)))

    assert steps(last=-0.09) == [0, 2]
    assert sorted(steps(last=-0.11)) == [0, 1]


def test_a_late_step_keeps_its_share_of_the_time_however_far_it_is() -> None:
    """The first 6 s of each 60 are its own, also after it ran as long as predicted, and beside a row without slack."""
    late, fresh = prompt(0, 6000, slo=SLO(ttft=1.0)), prompt(2, 400, arrival=123.0)
    row = settled(decoding(1, 1000, due=123.0))
    policy = Unified(ageing=0.1)
    for left in (5.0, 0.1, 0.0):
        for rows, role in (([], Role.PREFILL), ([row], Role.MIXED)):
            for now in (121.0, 130.0):
                at = view([fresh], rows, role=role, limits=LIMITS, now=now, start=now)
                decision = policy.decide(replace(at, suspended=(Task(7, (late,), left, 6.0),)))
                assert (decision.resume == 7) == (now == 121.0), (left, role, now)


@pytest.mark.parametrize("options", [{"ageing": -1.0}, {"ageing": 2.0}, {"patience": 0.5}, {"patience": inf}])
def test_options_outside_of_their_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InvalidValue, match=f"{next(iter(options))}="):
        Unified(**options)


def test_a_suspended_step_resumes_beside_rows_with_enough_slack() -> None:
    late, policy = prompt(0, 6000, tier=BEST_EFFORT), Unified(ageing=0.1)
    stopped = (Task(7, (late,), 2.0),)
    ahead, soon = settled(decoding(1, 1000, due=3.0)), settled(decoding(1, 1000, due=1.0))
    for row, now, resumed in ((ahead, 5.0, 7), (soon, 5.0, None), (soon, 0.0, 7)):  # the first 2 s of 20 are its share
        row.budget += now
        row.token_times = [now]
        at = view([], [row], role=Role.MIXED, limits=LIMITS, suspended=stopped, now=now, start=now)
        assert policy.decide(at).resume == resumed, (now, resumed)


@pytest.mark.parametrize("routing", ["unified", "deflect:dropped"])
def test_a_prompt_demoted_on_one_instance_is_on_time_on_another(routing: str) -> None:
    """Twelve prompts of 1 s due in 8 s: the prefill instance computes 8 in time, the decode instance the others."""
    arrivals = [Arrival(0.001 * one, 10_000, 2, SLO(ttft=8.5, tpot=0.05)) for one in range(12)]
    alone = simulate(arrivals, "unified", Mesh(2), LATENCY, options=Options(routing="least_work"))
    both = simulate(arrivals, "unified", Mesh(2), LATENCY, options=Options(routing=routing))
    assert round(alone.summary.ttft_attained * 12) == 8
    assert both.summary.ttft_attained > alone.summary.ttft_attained


def test_mixed_instances_keep_the_tpot_beside_a_hopeless_prompt() -> None:
    """A prompt of 3 s due in 1 s gets the time left by rows with joint steps of 4 of 5 ms."""
    quick = replace(LATENCY, coefficients=replace(TRUTH, prefill=1e-5))
    rows = [Arrival(0.1 * one, 18_000, 1500, SLO(ttft=9.0, tpot=0.005)) for one in range(4)]
    late = Arrival(2.0, 300_000, 2, SLO(ttft=1.0, tpot=0.005))
    report = simulate([*rows, late], "unified", Mesh(1), quick)
    assert [one.attained for one in report.measured] == [True] * 4 + [False]
