"""The fast path for running decodes in `plan` gives the same plans as the general path."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.new_request import STANDARD
from jaxserve.sched.api.plan import StepPlan
from jaxserve.sched.api.request import BEST_EFFORT
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.instance.step_builder import StepBuilder
from tests.support.examples import examples
from tests.support.sched.complete import JOB, ROLES
from tests.support.sched.harness import Outcome, simulate

TIERED = st.builds(
    lambda job, tpot, tier: replace(job, slo=SLO(0.1, tpot), tier=tier), JOB, st.sampled_from([0.001, 0.02, 0.3]),
    st.sampled_from([STANDARD, STANDARD, BEST_EFFORT]),
)  # fmt: skip


class Checked(Scheduler):
    """A scheduler that checks after every plan that the columns agree with the requests."""

    def plan(self, now: float, start: float) -> StepPlan | None:
        plan = super().plan(now, start)
        for table in (self._queues.prefill, self._queues.decode):
            requests = list(table)
            assert np.array_equal(table.deadline, [one.deadline for one in requests])
            assert np.array_equal(table.context, [one.computed for one in requests])
            assert np.array_equal(table.remaining, [one.remaining for one in requests])
        return plan


def history(outcome: Outcome) -> list[Any]:
    return [outcome.plans, outcome.deltas, [one.token_times for one in outcome.requests], outcome.counters]


@given(
    jobs=st.lists(TIERED, min_size=1, max_size=8),
    roles=st.sampled_from(list(ROLES.values())),
    policy=st.sampled_from(["distserve", "kairos", "fairbatching", "slos_serve", "unified"]),
    pages=st.integers(9, 20),
    rows=st.integers(1, 6),
    draft=st.sampled_from([0, 2]),
    lead=st.sampled_from([0.0, 0.0005]),
)
@settings(max_examples=examples(60), deadline=None)
def test_the_fast_path_ends_in_the_same_state_as_the_general_one(**case: Any) -> None:
    short = simulate(**case, tokens=16, acceptance=0.5, scheduler=Checked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepBuilder, "_again", lambda self, request, start: self._span(request, 1, 0))
        long = simulate(**case, tokens=16, acceptance=0.5, scheduler=Checked)
    assert history(short) == history(long)
