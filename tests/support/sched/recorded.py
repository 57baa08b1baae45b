"""Runs recorded in a journal."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from jaxserve.sched.api.log import Log
from jaxserve.sched.api.perf import PerfModel
from jaxserve.sched.api.plan import StepPlan
from jaxserve.sched.api.policy import Limits, Role
from jaxserve.sched.journal import Journal
from jaxserve.sched.perf.recipe import Recipe
from tests.support.sched.complete import ROLES
from tests.support.sched.harness import COEFFICIENTS, Job, simulate


def perf(record: Mapping[str, Any]) -> PerfModel:
    return Recipe.of(record).make()


def recorded(
    jobs: list[Job], roles: str, policy: str, every: int = 10_000, routing: str = "least_work", **more: Any
) -> str:
    file, count = io.StringIO(), [0]
    journal = Journal(file)
    limits = Limits(16, 4, 14, 4)

    def log(name: str) -> Log:
        role = Role(name.rstrip("0123456789"))
        described = Recipe("general", coefficients=COEFFICIENTS).record()
        return journal.instance(name, policy=policy, limits=limits, role=role, prefix_caching=True, perf=described)

    def fails(name: str, plan: StepPlan) -> bool:
        count[0] += 1
        return count[0] % every == 0 and count[0] < 40

    shape = {"policy": policy, "routing": routing, "log": log, "fails": fails, **more}
    simulate(jobs, ROLES[roles], pages=14, rows=4, tokens=16, **shape)
    return file.getvalue()
