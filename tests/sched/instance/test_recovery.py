"""Recovery from steps that raised and lost their pool: retries one by one, and what is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.sched import policies
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import StepPlan, StepResult
from jaxserve.sched.api.policy import Limits, Role
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.instance.step_builder import drop
from jaxserve.sched.perf.model import GeneralModel
from tests.support.sched.harness import COEFFICIENTS, Job, Outcome, simulate

PROMPT = list(range(100, 114))


def request(id: int, prompt: list[int] | None = None) -> Request:
    return Request(id, NewRequest(prompt or [id] * 6, SamplingParams(max_tokens=8), SLO()), float(id))


def scheduler() -> Scheduler:
    return Scheduler(policies.make("distserve"), GeneralModel(COEFFICIENTS), Limits(32, 4, 16, 4))


def settle(one: Scheduler, plan: StepPlan | None) -> None:
    assert plan is not None
    one.settle(StepResult(plan.step, 0.0, 1.0, tuple((7,) if span.samples else () for span in plan.spans)))


def test_requests_of_a_failed_step_are_retried_alone() -> None:
    """To find the request at fault, the next step of each has no other request in it."""
    one = scheduler()
    for id in range(3):
        one.add(request(id))
    together = one.plan(0.0, 0.0)
    assert together is not None and len(together.spans) == 3
    assert one.recover() == []
    one.add(request(3))
    untried = {0, 1, 2}
    while len(one):
        plan = one.plan(0.0, 0.0)
        assert plan is not None
        ids = {span.request for span in plan.spans}
        assert len(ids) == 1 or not ids & untried, f"{ids & untried} are retried beside others"
        untried -= ids
        settle(one, plan)
    assert not untried


def test_requests_are_retried_alone_while_another_waits_for_pages() -> None:
    """If the next request to retry does not fit, the policy decides, and it wants the others in one step."""
    one = scheduler()
    for id, length in enumerate((6, 6, 20)):
        one.add(request(id, [id] * length))
    together = one.plan(0.0, 0.0)
    assert together is not None and [span.request for span in together.spans] == [0, 1, 2]
    assert one.recover() == []
    coming = request(9)
    coming.pages = list(range(11))  # page ids on the instance that computes its prompt
    reservation = one.reserve(coming)
    assert reservation is not None and one.blocks.available == 5, (
        "there are enough pages for request 2, the first to be retried"
    )
    order = []
    for step in range(5):
        plan = one.plan(0.0, 0.0)
        assert plan is not None
        order.append([span.request for span in plan.spans])
        settle(one, plan)
        if step == 2:
            one.unreserve(reservation)
    assert order == [[0], [0], [0], [2], [1]], "request 1 was retried beside request 0, which had passed"


def test_reservations_in_a_lost_pool_are_not_released_into_the_new_one() -> None:
    one = scheduler()
    coming = request(9)
    coming.pages = [3, 1]  # page ids on the instance that computes its prompt
    reservation = one.reserve(coming)
    assert reservation is not None and one.reserved(reservation) and one.blocks.available == 14
    assert one.recover() == []
    assert not one.reserved(reservation) and one.blocks.available == 16
    one.unreserve(reservation)  # its KV transfer learns of the loss later
    one.check()
    assert one.blocks.available == 16 and one.running == 0


def test_a_waiting_request_expects_no_hits_from_a_lost_pool() -> None:
    one = scheduler()
    one.add(request(0, PROMPT))
    while len(one):
        settle(one, one.plan(0.0, 0.0))
    for id in range(1, 5):
        one.add(request(id))  # one per slot
    waiting = request(5, PROMPT)
    one.add(waiting)
    assert waiting.hit == 12
    one.plan(0.0, 0.0)
    one.recover()
    assert (waiting.hit, one.cached_tokens(waiting)) == (0, 0)
    assert one.prefill_backlog == 14 + 4 * 6
    one.check()


def test_a_request_cancelled_after_its_kv_was_dropped_releases_nothing_twice() -> None:
    one = scheduler()
    gone, stays = request(0), request(1)
    one.add(gone)
    one.add(stays)
    settle(one, one.plan(0.0, 0.0))
    drop(gone, one._queues, one._kv)
    one.check()
    one.cancel(0, "abort")
    one.check()
    assert [other.id for other in one] == [1] and one._kv.free_slots == 3


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
