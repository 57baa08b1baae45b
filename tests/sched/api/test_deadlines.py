"""A request's deadline counts its tokens, whatever happens to the steps that compute them."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.sched.api.plan import StepPlan
from jaxserve.sched.api.request import State
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.scheduler import Scheduler
from tests.support.sched.complete import ROLES
from tests.support.sched.harness import Job, every, simulate

TPOT = 0.125  # a power of two, so that its sums are exact


class Watched(Scheduler):
    """A scheduler that checks after every plan and result that budgets count the tokens sampled or in flight."""

    def plan(self, *args: Any) -> StepPlan | None:
        made = super().plan(*args)
        self._look()
        return made

    def settle(self, *args: Any) -> Any:
        made = super().settle(*args)
        self._look()
        return made

    def recover(self) -> Any:
        made = super().recover()
        self._look()
        return made

    def _look(self) -> None:
        for one in self:
            if one.state is not State.FINISHED:
                assert one.budget == one.generated * TPOT, f"{one} has a budget of {one.budget / TPOT} tokens"


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize(
    "shape",
    [
        {"lead": 0.001},
        {"fails": every(7)},
        {"policy": "distserve/draft:no-adaptive", "draft": 3, "acceptance": 0.5},
        {"policy": "distserve/draft:no-adaptive", "draft": 3, "acceptance": 0.5, "fails": every(5)},
        {"pages": 14, "rows": 4, "tokens": 16},
        {"pages": 14, "rows": 4, "tokens": 16, "lead": 0.001},
    ],
    ids=["planned ahead", "steps fail", "drafts", "drafts in steps that fail", "KV is dropped", "KV is dropped ahead"],
)
def test_budgets_count_the_tokens(roles: str, shape: dict[str, Any]) -> None:
    jobs = [Job(range(100 * i, 100 * i + 5 + i), 12, i * 0.004, SLO(1.0, TPOT)) for i in range(8)]
    outcome = simulate(jobs, ROLES[roles], scheduler=Watched, **{"policy": "distserve", **shape})
    assert sum(len(request.output) for request in outcome.requests) > 60
