"""Laws of a cluster in virtual time: no request is lost, none waits forever, and tokens do not change."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.errors import StepFailed
from jaxserve.sched.api.new_request import STANDARD
from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.request import BEST_EFFORT
from jaxserve.sched.api.slo import NO_SLO, SLO
from tests.support.examples import examples
from tests.support.sched.cases import POLICIES, SLOS
from tests.support.sched.complete import JOB, PD, ROLES, check_complete, check_told
from tests.support.sched.harness import Job, every, simulate


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("policy", ["distserve", "kairos"])
def test_serves_a_mixed_load(roles: str, policy: str) -> None:
    draw = random.Random(1)
    jobs = [Job(range(1000 * i, 1000 * i + draw.randint(1, 60)), draw.randint(1, 30), i * 0.002) for i in range(40)]
    check_complete(simulate(jobs, ROLES[roles], policy=policy), jobs)


TIERED = st.builds(
    lambda job, slo, tier: replace(job, slo=NO_SLO if tier == BEST_EFFORT else slo, tier=tier),
    job=JOB,
    slo=st.sampled_from(SLOS),
    tier=st.sampled_from([STANDARD, STANDARD, BEST_EFFORT]),
)


@given(
    jobs=st.lists(TIERED, min_size=1, max_size=8),
    roles=st.sampled_from([*ROLES.values(), (Role.MIXED, Role.MIXED)]),
    policy=st.sampled_from(POLICIES),
    pages=st.integers(9, 14),
    rows=st.integers(1, 4),
    tokens=st.integers(1, 16),
    draft=st.sampled_from([0, 0, 3]),
    lead=st.sampled_from([0.0, 4e-4]),
    first_token=st.sampled_from(["prefill", "decode"]),
    prefix_caching=st.booleans(),
)
@settings(max_examples=examples(400), deadline=None)
def test_pools_of_a_few_pages_never_deadlock(jobs: list[Job], roles: tuple[Role, ...], **shape: Any) -> None:
    """Requests of up to 34 tokens in pools of 36 to 56 pages make admission, growth, drops and transfers collide."""
    check_complete(simulate(jobs, roles, acceptance=0.6, **shape), jobs, cancelled=True)


@given(
    jobs=st.lists(JOB, min_size=1, max_size=6),
    roles=st.sampled_from(list(ROLES.values())),
    fail=st.integers(3, 7),
)
@settings(max_examples=examples(60))
def test_steps_that_raise_cost_no_token(jobs, roles, fail) -> None:  # type: ignore[no-untyped-def]
    check_told(simulate(jobs, roles, pages=14, rows=4, tokens=16, fails=every(fail)))


def test_lost_pools_do_not_count_as_failures_of_the_link() -> None:
    """Between the loss of a pool and its replacement every transfer fails at once, more often than a link may."""
    left = iter(range(7))

    def loses() -> bool:
        if next(left, None) is not None:
            raise StepFailed("injected: the pool is gone")
        return False

    outcome = simulate([Job(range(10), 8)], PD, loses=loses)
    assert next(left, None) is None and outcome.requests[0].finish_reason == "stop"


def test_dropped_kv_keeps_no_pages_reserved_elsewhere() -> None:
    """A best-effort request with pages reserved on its decode instance loses its KV to a prompt that needs them."""
    best: dict[str, Any] = {"slo": SLO(inf, inf), "tier": BEST_EFFORT}
    jobs = [
        Job(range(41), 5, **best),
        Job(range(1000, 1036), 6, 0.002),
        Job(range(2000, 2006), 3, 0.004),
    ]
    outcome = simulate(jobs, PD, pages=20, tokens=16)
    assert outcome.requests[0].drops == 1
    check_complete(outcome, jobs)


def test_the_flag_decides_where_the_first_token_counts() -> None:
    jobs = [Job(range(30), 5)]
    early = simulate(jobs, PD).requests[0]
    late = simulate(jobs, PD, first_token="decode").requests[0]
    assert early.first_token_at is not None and late.first_token_at is not None
    assert late.first_token_at > early.first_token_at + 1e-3  # the latency of the link
    assert late.token_times[0] == late.first_token_at
