"""A request that makes its steps raise fails alone and costs the others their KV only once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.sched.api.plan import StepPlan
from jaxserve.sched.api.policy import Role
from tests.support.sched.harness import Job, Outcome, simulate

MIXED = Role.MIXED


def poison(culprit: int, position: int = 0) -> Callable[[str, StepPlan], bool]:
    """Raise in steps that compute a request beyond a position."""

    def fails(name: str, plan: StepPlan) -> bool:
        return any(span.request == culprit and span.start + span.length > position for span in plan.spans)

    return fails


def prefills(outcome: Outcome, request: int) -> int:
    """Count the successful steps that began the prompt of a request."""
    return sum(span.request == request and span.start == 0 for _, plan in outcome.plans for span in plan.spans)


def run(fails: Callable[[str, StepPlan], bool], jobs: list[Job], **shape: Any) -> Outcome:
    return simulate(jobs, (MIXED,), fails=fails, prefix_caching=False, **{"pages": 256, **shape})


@pytest.mark.parametrize("policy", ["distserve", "unified", "kairos", "fairbatching", "slos_serve", "vllm"])
def test_a_request_that_fails_in_its_first_step_costs_the_others_their_kv_once(policy: str) -> None:
    jobs = [Job(range(index * 50, index * 50 + 12), 40, 0.001 * index) for index in range(6)]
    jobs.append(Job(range(500, 512), 40, 0.03))  # the others decode by then
    outcome = run(poison(6), jobs, policy=policy)
    assert [one.finish_reason for one in outcome.requests] == ["stop"] * 6 + ["error"]
    assert outcome.requests[6].error == "the step that computed this request failed twice"
    assert outcome.counters["mixed0"].rebuilds == 2
    assert all(prefills(outcome, index) <= 2 for index in range(6)), [prefills(outcome, index) for index in range(6)]


@pytest.mark.parametrize("position", [12, 15, 30])
@pytest.mark.parametrize("tokens", [5, 32])
def test_a_request_that_fails_later_is_found_at_the_failing_position(position: int, tokens: int) -> None:
    """Its prompt is recomputed without fault; only at the position of the failure does a step raise again."""
    jobs = [Job(range(index * 50, index * 50 + 12), 40, 0.001 * index) for index in range(5)]
    outcome = run(poison(2, position), jobs, tokens=tokens)
    assert [one.finish_reason for one in outcome.requests] == ["stop", "stop", "error", "stop", "stop"]
    assert outcome.counters["mixed0"].rebuilds == 2
    assert all(len(one.output) == 40 for one in outcome.requests if one.finish_reason == "stop")


def test_several_failing_requests_all_fail_alone() -> None:
    jobs = [Job(range(index * 50, index * 50 + 12), 20, 0.001 * index) for index in range(8)]
    outcome = run(lambda name, plan: any(span.request in (1, 4, 5) for span in plan.spans), jobs)
    reasons = [one.finish_reason for one in outcome.requests]
    assert reasons == ["stop", "error", "stop", "stop", "error", "error", "stop", "stop"]


@pytest.mark.parametrize("rows", [2, 3, 8])
@pytest.mark.parametrize("lead", [0.0, 1e-3])
def test_retries_wait_for_reserved_slots(rows: int, lead: float) -> None:
    """On a decode instance, requests in transfer may take the slots before the retries; both still finish."""
    jobs = [Job(range(index * 50, index * 50 + 12), 30, 0.001 * index) for index in range(14)]
    raised: list[int] = []

    def fails(name: str, plan: StepPlan) -> bool:
        raised.append(name == "decode1")
        return name == "decode1" and sum(raised) in (3, 9, 20)

    outcome = simulate(jobs, (Role.PREFILL, Role.DECODE), fails=fails, rows=rows, pages=400, lead=lead)
    assert {one.finish_reason for one in outcome.requests} <= {"stop", "error"}
    assert sum(one.finish_reason == "stop" for one in outcome.requests) >= 12
