"""Steps that stop at a segment boundary and resume later: exact times, and nothing lost under any policy."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.plan import StepPlan
from jaxserve.sched.api.policy import Decision, Grant, View
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.journal import replay
from tests.support.examples import examples
from tests.support.sched.complete import JOB, ROLES, check_complete
from tests.support.sched.harness import COEFFICIENTS, Job, Outcome, simulate
from tests.support.sched.recorded import perf, recorded

LONG, SHORT = 800, 10  # tokens
T_LONG, T_SHORT = (COEFFICIENTS.step_time(Load().add_chunk(tokens, 0)) for tokens in (LONG, SHORT))
SEGMENT = T_LONG / 10


def preempting(jobs: list[Job], **shape: Any) -> Outcome:
    fields: dict[str, Any] = {
        "policy": "flowprefill", "preemptible": True, "segments": 10, "pages": 2000, "tokens": 1000,
    }  # fmt: skip
    return simulate(jobs, **{**fields, **shape})


def job(length: int, arrival: float = 0.0, ttft: float = 8.0, cancel_at: float | None = None, output: int = 1) -> Job:
    start = round(arrival * 1e7) * 1000  # no two jobs share a prefix
    return Job(range(start, start + length), output, arrival, SLO(ttft=ttft), cancel_at=cancel_at)


def firsts(outcome: Outcome) -> list[float]:
    return [request.token_times[0] for request in outcome.requests]


def test_a_preempted_step_resumes_without_extra_time() -> None:
    """Stopped within the second segment, the long step computes only its remaining segments after the short one."""
    outcome = preempting([job(LONG), job(SHORT, arrival=1.4 * SEGMENT, ttft=0.02)])
    assert firsts(outcome) == pytest.approx([T_LONG + T_SHORT, 2 * SEGMENT + T_SHORT], rel=1e-12)
    counters = outcome.counters["mixed0"]
    assert (counters.suspended, counters.resumed, counters.steps) == (1, 1, 2)
    assert counters.asked == sum(counters.blocked) == 1
    assert counters.blocking == pytest.approx(0.6 * SEGMENT, rel=1e-9)
    assert counters.measured_seconds == pytest.approx(T_LONG + T_SHORT, rel=1e-12)


def test_no_more_steps_are_suspended_than_the_limit() -> None:
    """Each prompt arrives in the first segment of the previous one, with an earlier deadline."""
    jobs = [job(LONG, arrival=0.9 * index * SEGMENT, ttft=8.0 - index) for index in range(5)]
    for limit in (1, 2, 3, 4):
        outcome = preempting(jobs, suspended=limit)
        assert outcome.counters["mixed0"].suspended == limit
        stopped = SEGMENT * limit
        nested = [stopped + T_LONG, *(stopped + T_LONG + (T_LONG - SEGMENT) * (i + 1) for i in range(limit))]
        order = sorted(range(5), key=lambda index: firsts(outcome)[index])
        if limit == 4:
            assert order == [4, 3, 2, 1, 0]
            assert sorted(firsts(outcome)) == pytest.approx(nested, rel=1e-12)
        else:  # at the limit, the running step ends, then the earliest deadline is served
            assert order[:2] == [limit, 4]


def test_a_step_that_raises_discards_suspended_steps_and_costs_no_token() -> None:
    """The request of the step that raised is retried alone; the suspended one is recomputed from the start."""
    jobs = [job(LONG, output=3), job(SHORT, arrival=1.4 * SEGMENT, ttft=0.02, output=3)]
    seen: list[int] = []

    def fails(name: str, plan: StepPlan) -> bool:
        seen.append(plan.step)
        return len(seen) == 1

    outcome = preempting(jobs, fails=fails)
    assert [request.finish_reason for request in outcome.requests] == ["stop", "stop"]
    assert [len(request.output) for request in outcome.requests] == [3, 3]
    raised = 2 * SEGMENT + T_SHORT
    assert firsts(outcome)[1] == pytest.approx(raised + T_SHORT, rel=1e-12)
    assert outcome.counters["mixed0"].rebuilds == 1 and outcome.counters["mixed0"].resumed == 0


class Chaos:
    """A policy that stops, resumes and schedules at random among the legal choices. Writer of its generator."""

    def __init__(self, seed: int) -> None:
        self._die = random.Random(seed)

    def decide(self, view: View) -> Decision:
        die = self._die
        if view.running is not None:
            return Decision(preempt=die.random() < 0.7)
        if view.suspended and die.random() < 0.3:
            return Decision(resume=die.choice(view.suspended).step)
        grants = [Grant(one.id, die.choice([one.remaining, die.randint(1, 8)])) for one in view.prefill]
        grants += [Grant(one.id, 1) for one in view.decode]
        die.shuffle(grants)
        return Decision(tuple(grants), prompts=die.choice([1, 2, 1 << 30]))


URGENT = st.builds(lambda job, ttft: replace(job, slo=SLO(ttft)), JOB, st.sampled_from([0.002, 0.005, 0.02, 8.0]))


@given(
    jobs=st.lists(URGENT, min_size=1, max_size=8),
    roles=st.sampled_from(list(ROLES.values())),
    seed=st.none() | st.integers(0, 1000),
    pages=st.integers(9, 14),
    rows=st.integers(1, 4),
    tokens=st.integers(1, 16),
    suspended=st.integers(0, 4),
    segments=st.integers(1, 10),
    lead=st.sampled_from([0.0, 0.002]),
)
@settings(max_examples=examples(150))
def test_tiny_pools_with_preemption_never_deadlock(  # type: ignore[no-untyped-def]
    jobs, roles, seed, pages, rows, tokens, suspended, segments, lead
) -> None:
    """Under FlowPrefill or random preemption, suspended steps hold pages and slots that others wait for."""
    policy = "flowprefill" if seed is None else lambda: Chaos(seed)
    outcome = preempting(
        jobs,
        roles=roles,
        policy=policy,
        pages=pages,
        rows=rows,
        tokens=tokens,
        suspended=suspended,
        segments=segments,
        lead=lead,
    )
    check_complete(outcome, jobs, cancelled=True)


@given(
    jobs=st.lists(URGENT, min_size=1, max_size=10), seed=st.none() | st.integers(0, 1000), segments=st.integers(1, 10)
)
@settings(max_examples=examples(60))
def test_preemption_neither_adds_nor_saves_time(jobs, seed, segments) -> None:  # type: ignore[no-untyped-def]
    """With whole prompts, one a step, the order does not matter: total time is that without preemption."""
    whole = [Job(one.prompt, 1, one.arrival, one.slo) for one in jobs]
    shape: dict[str, Any] = {"prompts": 1, "tokens": 7, "pages": 100, "prefix_caching": False, "segments": segments}
    policy = "flowprefill:batch=0" if seed is None else lambda: Orderly(seed)
    plain = simulate(whole, policy="distserve", **shape)
    stopped = preempting(whole, policy=policy, **shape)
    before, after = plain.counters["mixed0"], stopped.counters["mixed0"]
    assert after.steps == before.steps and after.prompt_tokens == before.prompt_tokens
    assert after.measured_seconds == pytest.approx(before.measured_seconds, rel=1e-9)
    assert after.suspended == after.resumed


class Orderly(Chaos):
    """Like Chaos, but schedules whole prompts."""

    def decide(self, view: View) -> Decision:
        decision = super().decide(view)
        return Decision(
            tuple(Grant(grant.request, 1 << 20) for grant in decision.grants),
            resume=decision.resume,
            preempt=decision.preempt,
        )


def test_a_journal_records_the_whole_time_of_a_resumed_step() -> None:
    jobs = [job(LONG), job(SHORT, arrival=1.4 * SEGMENT, ttft=0.02)]
    text = recorded(jobs, "1x1", "flowprefill", preemptible=True, segments=10, pages=2000, rows=8, tokens=1000)
    found = replay(text.splitlines(), perf)
    assert found.differences == []
    assert [step.seconds for step in found.steps] == pytest.approx([T_SHORT, T_LONG], rel=1e-12)
