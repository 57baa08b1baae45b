"""Fleets of several instances, as routers see them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import StepPlan, StepResult
from jaxserve.sched.api.policy import Limits, Role
from jaxserve.sched.api.request import BEST_EFFORT, Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.policies.sarathi import Sarathi
from jaxserve.sched.routing.base import Fleet

# 10 ms a step, 1 ms a prompt token, 1 ms a row
PERF = Coefficients(0.010, 1e-3, 1e-3, 0.0, 0.0, 0.0)


def instance(role: Role, pages: int = 6000, rows: int = 256) -> Scheduler:
    return Scheduler(Sarathi(), GeneralModel(PERF, correct=False), Limits(8192, rows, pages, 16), role)


def request(id: int, tokens: int, ttft: float = 8.0, tier: str = "standard", tpot: float = 0.05) -> Request:
    slo = SLO(inf, inf) if tier == BEST_EFFORT else SLO(ttft, tpot)
    return Request(id, NewRequest(range(100_000 * id, 100_000 * id + tokens), SamplingParams(), slo, tier=tier), 0.0)


def fleet(instances: Sequence[Scheduler], transfer: float = 0.0) -> Fleet:
    return Fleet(0.0, instances, lambda tokens: transfer * tokens)


def step(one: Scheduler, at: float = 0.0) -> StepPlan:
    """Plan a step and settle it with token 7 for each span that samples."""
    plan = one.plan(at, at)
    assert plan is not None
    one.settle(StepResult(plan.step, at, at, tuple((7,) if span.samples else () for span in plan.spans)))
    return plan


def decodes(one: Scheduler, id: int, context: int, tpot: float = 0.05) -> None:
    """Add a running decode to the instance, with its prompt done at time 0."""
    row = request(id, context, tpot=tpot)
    row.params = SamplingParams(max_tokens=1000)
    row.limit = 1000
    one.add(row)
    while not row.output:
        step(one)
