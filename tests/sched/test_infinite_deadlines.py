"""Infinite and extreme objectives: deadlines are never NaN, even if tokens are lost or withdrawn."""

from __future__ import annotations

import random
import re
from itertools import product
from math import inf, isfinite, isnan, nan
from typing import Any

import pytest

from jaxserve.sched import admission, policies, routing
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.new_request import STANDARD, NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.request import BEST_EFFORT, Request, State
from jaxserve.sched.api.slo import ANSWER, LONGEST, NO_SLO, SHORTEST, SLO, THINKING
from jaxserve.sched.api.thinking import ThinkingEnd
from jaxserve.sched.sim.executor import END_THINKING
from tests.support.sched.harness import Job, Outcome, every
from tests.support.sched.laws import Watch

STAGES = [
    SLO(tpot=inf, stages=((THINKING, inf), (ANSWER, 0.05))),
    SLO(tpot=inf, stages=((THINKING, 0.05), (ANSWER, inf))),
]


def granted(slo: SLO, output: int, pending: int) -> Request:
    """Return a request with `output` tokens and `pending` more sampled by steps in flight."""
    thinking = ThinkingEnd(((END_THINKING,),)) if slo.stages else None
    one = Request(0, NewRequest(range(4), SamplingParams(max_tokens=50), slo), 0.0, thinking=thinking)
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
def test_a_lost_pool_withdraws_pending_tokens(slo: SLO, output: int, pending: int) -> None:
    one, same = granted(slo, output, pending), granted(slo, output, 0)
    one.forget_cache()
    assert one.budget == pytest.approx(same.budget) and not isnan(one.deadline)
    assert one.pending == 0


@pytest.mark.parametrize("slo", [NO_SLO, SLO(), *STAGES])
def test_rejected_drafts_are_withdrawn(slo: SLO) -> None:
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


@pytest.mark.parametrize("seconds", [1e300, -1e300, 1e-300, 0.0, -0.0, nan, -inf, 1.1e9, 0.9e-9])
@pytest.mark.parametrize("name", ["ttft", "tpot", "tbt", "stages"])
def test_objectives_out_of_range_are_refused(name: str, seconds: float) -> None:
    with pytest.raises(InvalidValue, match=f"SLO {name}.*={re.escape(repr(seconds))} must be .* from 1e-09 to 1e\\+09"):
        SLO(**{name: ((ANSWER, seconds),) if name == "stages" else seconds})  # type: ignore[arg-type]


EXTREMES = [SLO(SHORTEST, SHORTEST), SLO(LONGEST, LONGEST), SLO(SHORTEST, LONGEST), SLO(LONGEST, SHORTEST)]


@pytest.mark.parametrize("policy", policies.names())
def test_no_table_ever_holds_nan(policy: str) -> None:
    """Run extreme objectives at random with steps that raise.

    Tables are checked at every event, the policy sees sealed views, and an overflow in numpy is an
    error.
    """
    outcome = run_extremes(policy, [Role.MIXED])
    assert all(isfinite(time) for one in outcome.requests for time in one.token_times)


PAIRS = list(product(routing.ROUTERS, admission.ADMISSIONS))


@pytest.mark.parametrize(("place", "admit"), PAIRS)
def test_routers_and_admissions_compute_with_extreme_objectives(place: str, admit: str) -> None:
    """Each pair of router and admission runs with the next policy, since all policies would repeat the same sums."""
    names = policies.names()
    policy = names[PAIRS.index((place, admit)) % len(names)]
    for roles in ([Role.PREFILL, Role.DECODE], [Role.MIXED, Role.MIXED]):
        run_extremes(policy, roles, routing=place, admission=admit)


def run_extremes(policy: str, roles: list[Role], **shape: Any) -> Outcome:
    """Serve 30 requests with objectives at the edge of the allowed range."""
    rng = random.Random(11)
    slos = [NO_SLO, SLO(ttft=inf), SLO(tpot=inf), *EXTREMES, SLO(ttft=1.0, tpot=0.01, tbt=inf), SLO(tbt=SHORTEST)]
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
    outcome = Watch(policy, seal=True).run(
        jobs, roles, rows=4, pages=60, fails=every(17, until=10_000), draft=2, acceptance=0.5, lead=1e-3, **shape
    )
    assert len(outcome.requests) == 30
    return outcome
