"""Best-effort requests beyond those shown to policies: in order, never lost, and without cost per step."""

from __future__ import annotations

import random
from math import inf
from typing import Any

import pytest

from jaxserve.sched import policies
from jaxserve.sched.api.new_request import STANDARD, NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.policy import Decision, Grant, Limits, Role, View
from jaxserve.sched.api.request import BEST_EFFORT, Request
from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.perf.model import GeneralModel
from tests.support.sched.harness import COEFFICIENTS, Job
from tests.support.sched.laws import Watch


def request(id: int, tier: str = BEST_EFFORT, priority: int = 0, arrival: float | None = None) -> Request:
    at = id * 1e-3 if arrival is None else arrival
    slo = NO_SLO if tier == BEST_EFFORT else SLO()
    return Request(
        id, NewRequest(range(16), SamplingParams(max_tokens=4), slo, tier=tier, priority=priority), at, seed=id
    )


def scheduler(policy: Any = "unified", rows: int = 4) -> Scheduler:
    limits = Limits(64, rows, 400, 4)
    made = policies.make(policy) if isinstance(policy, str) else policy
    return Scheduler(made, GeneralModel(COEFFICIENTS), limits, Role.MIXED, prefix_caching=False)


def seen(one: Scheduler) -> list[int]:
    return [request.id for request in one.view(0.0, 0.0).prefill]


def test_a_policy_sees_the_first_best_effort_requests_and_all_others() -> None:
    one = scheduler()
    for id in range(500):
        one.add(request(id))
    assert seen(one) == list(range(64)) and one.waiting == 500 and one.prefill_backlog == 500 * 16
    for id in range(500, 510):
        one.add(request(id, STANDARD))
    assert seen(one) == [*range(500, 510), *range(64)]
    one.add(request(600, priority=-1, arrival=9.0))
    assert seen(one) == [*range(500, 510), 600, *range(63)]
    one.check()
    for id in (*range(500, 510), 600, *range(400)):
        assert one.cancel(id, "abort") is not None
        one.check()
    assert seen(one) == list(range(400, 464))
    assert one.cancel(499, "abort") is not None
    assert seen(one) == list(range(400, 464)) and one.prefill_backlog == 99 * 16


@pytest.mark.parametrize("policy", policies.names())
def test_every_request_of_a_long_queue_is_served(policy: str) -> None:
    """Check the queues against the existing requests at every event."""
    rng = random.Random(7)
    tiers = [BEST_EFFORT] * 9 + [STANDARD]
    jobs = [
        Job(
            range(index * 50, index * 50 + rng.randint(3, 30)),
            rng.randint(1, 6),
            rng.random() * 0.2,
            SLO(ttft=rng.choice([0.05, 1.0, inf])),
            tier=rng.choice(tiers),
            cancel_at=0.3 if index % 11 == 0 else None,
        )
        for index in range(180)
    ]
    watch = Watch(policy, seal=False)
    outcome = watch.run(jobs, [Role.MIXED], rows=3, pages=40)
    assert len(outcome.requests) == 180
    assert {one.finish_reason for one in outcome.requests} <= {"stop", "length", "abort"}


class DemotesAndGrantsAll:
    """A policy that demotes every request with objectives, and grants all that it sees, in this order or backward."""

    def __init__(self, step: int) -> None:
        self.step = step

    def decide(self, view: View) -> Decision:
        late = tuple(one.id for one in view.prefill if one.tier == STANDARD)
        return Decision(tuple(Grant(one.id, 16) for one in list(view.prefill)[:: self.step]), demote=late)


@pytest.mark.parametrize(
    ("step", "others", "own", "granted", "shown"),
    [
        pytest.param(1, -1, 0, [0, 1, 2, 3], False, id="it waits behind those shown"),
        pytest.param(-1, 0, -1, [62, 61, 60, 59], True, id="it takes the place of one that is granted"),
    ],
)
def test_a_request_that_is_granted_and_demoted_at_once(
    step: int, others: int, own: int, granted: list[int], shown: bool
) -> None:
    one = scheduler(DemotesAndGrantsAll(step))
    for id in range(100):
        demoted = request(id, STANDARD, priority=others)
        demoted.tier = BEST_EFFORT
        one.add(demoted)
    one.add(request(200, STANDARD, priority=own))
    plan = one.plan(0.0, 0.0)
    assert plan is not None and [span.request for span in plan.spans] == granted
    assert next(each for each in one if each.id == 200).tier == BEST_EFFORT and (200 in seen(one)) is shown
    one.check()
