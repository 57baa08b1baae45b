"""Objectives that are infinite, or nearly: deadlines are never NaN, whatever is lost or taken back."""

from __future__ import annotations

import random
from math import inf, isfinite, isnan

import pytest

from jaxserve.sched import policies
from jaxserve.sched.params import SamplingParams
from jaxserve.sched.policy import Role
from jaxserve.sched.request import BEST_EFFORT, STANDARD, Request, State
from jaxserve.sched.sim.executor import END_THINKING
from jaxserve.sched.slo import ANSWER, NO_SLO, SLO, THINKING
from jaxserve.sched.thinking import ThinkingEnd
from tests.support.sched.harness import Job
from tests.support.sched.laws import Watch

STAGES = [
    SLO(tpot=inf, stages=((THINKING, inf), (ANSWER, 0.05))),
    SLO(tpot=inf, stages=((THINKING, 0.05), (ANSWER, inf))),
]


def granted(slo: SLO, output: int, pending: int) -> Request:
    """A request that has `output` tokens, and `pending` more that submitted steps sample."""
    thinking = ThinkingEnd(((END_THINKING,),)) if slo.stages else None
    one = Request(0, range(4), SamplingParams(max_tokens=50), slo, 0.0, thinking=thinking)
    one.state = State.RUNNING
    for _ in range(output):
        one.pending += 1
        one.budget += one.tpot
        one.gain(7, 1.0)
    one.pending += pending
    for _ in range(pending):
        one.budget += one.tpot
    return one


@pytest.mark.parametrize("slo", [NO_SLO, SLO(), SLO(tpot=inf), *STAGES])
@pytest.mark.parametrize(("output", "pending"), [(0, 0), (0, 1), (1, 0), (1, 1), (3, 0), (3, 2)])
def test_a_pool_that_is_lost_takes_back_what_was_pending(slo: SLO, output: int, pending: int) -> None:
    one, same = granted(slo, output, pending), granted(slo, output, 0)
    one.forget_cache()
    assert one.budget == pytest.approx(same.budget) and not isnan(one.deadline)
    assert one.pending == 0


@pytest.mark.parametrize("slo", [NO_SLO, SLO(), *STAGES])
def test_drafts_that_were_wrong_are_taken_back(slo: SLO) -> None:
    one, same = granted(slo, 2, 4), granted(slo, 2, 1)
    one.take_back(3)
    assert one.budget == pytest.approx(same.budget) and one.pending == same.pending


@pytest.mark.parametrize("before", [0, 1, 3])
def test_an_answer_with_a_finite_tpot_after_infinite_thinking(before: int) -> None:
    one = granted(STAGES[0], before, 0)
    one.pending += 1
    one.budget += one.tpot
    one.gain(END_THINKING, 2.0)
    assert one.stage == ANSWER
    assert one.budget == (inf if before else pytest.approx(0.05))
    other = granted(STAGES[1], before, 0)
    other.pending += 1
    other.budget += other.tpot
    other.gain(END_THINKING, 2.0)
    assert other.budget == inf


@pytest.mark.parametrize("policy", policies.names())
def test_no_table_ever_holds_nan(policy: str) -> None:
    """Random runs of extreme objectives in which steps raise. Tables are checked at every move of the clock; the policy
    sees sealed views."""
    rng = random.Random(11)
    slos = [NO_SLO, SLO(ttft=inf), SLO(tpot=inf), SLO(1e-6, 1e-6), SLO(1e9, 1e9), SLO(ttft=1.0, tpot=0.01, tbt=inf)]
    jobs = [
        Job(
            range(index * 40, index * 40 + rng.randint(1, 30)),
            rng.randint(1, 12),
            rng.random() * 0.1,
            slo := rng.choice(slos),
            tier=BEST_EFFORT if slo is NO_SLO else STANDARD,
        )
        for index in range(30)
    ]
    steps = [0]

    def fails(name: str, plan: object) -> bool:
        steps[0] += 1
        return steps[0] % 17 == 0

    outcome = Watch(policy, seal=True).run(
        jobs, [Role.MIXED], rows=4, pages=60, fails=fails, draft=2, acceptance=0.5, lead=1e-3
    )
    assert len(outcome.requests) == 30
    assert all(isfinite(time) for one in outcome.requests for time in one.token_times)
