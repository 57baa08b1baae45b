"""Admission policies on hand-made schedulers: requests admitted, refused or demoted, and none lost."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched import admission
from jaxserve.sched.api.new_request import STANDARD, NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.policy import Limits, Role
from jaxserve.sched.api.request import BEST_EFFORT, Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.policies.sarathi import Sarathi
from tests.support.examples import examples
from tests.support.sched.harness import Job, simulate

# 10 ms a step, 1 ms a prompt token, 1 ms a row
PERF = Coefficients(0.010, 1e-3, 1e-3, 0.0, 0.0, 0.0)
ALL = ["none", "pab", "pab:refuse", "dp", "dp:refuse"]


def instance(role: Role = Role.MIXED, *, pages: int = 6000, caching: bool = False) -> Scheduler:
    limits = Limits(8192, 256, pages, 16)
    return Scheduler(Sarathi(), GeneralModel(PERF, correct=False), limits, role, prefix_caching=caching)


def request(id: int, tokens: int, ttft: float, tpot: float = 0.05, tier: str = STANDARD) -> Request:
    return Request(id, NewRequest(range(tokens), SamplingParams(), SLO(ttft, tpot), tier=tier), 0.0)


def most(name: str, one: Scheduler, ttft: float, now: float = 0.0) -> int:
    """Return the length of the longest prompt that is admitted."""
    admits, low, high = admission.make(name), 0, 1 << 14
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if admits.admits(request(99, middle, ttft), one, now) else (low, middle)
    return low


def test_a_suffix_selects_refusal_or_demotion() -> None:
    assert [admission.make(name).refuse for name in ALL] == [False, False, True, False, True]


def test_an_idle_instance_admits_what_it_can_compute_in_time() -> None:
    """A second less 10 ms for the step leaves 990 tokens of 1 ms; DP admits what is in time alone."""
    assert most("pab", instance(Role.PREFILL), 1.0) == 990
    assert most("dp", instance(Role.PREFILL), 1.0) == 990
    assert most("pab", instance(Role.PREFILL), 1.0, now=0.5) == 490


@pytest.mark.parametrize("name", ["pab", "dp"])
def test_promised_requests_use_capacity_and_best_effort_does_not(name: str) -> None:
    free, taken, idle = (instance(Role.PREFILL) for _ in range(3))
    taken.add(request(0, 400, ttft=1.0))
    idle.add(request(0, 400, ttft=inf, tpot=inf, tier=BEST_EFFORT))
    alone = most(name, free, 1.0)
    assert alone - 450 <= most(name, taken, 1.0) <= alone - 400
    assert most(name, idle, 1.0) == alone


def test_the_running_step_uses_time() -> None:
    one = instance(Role.PREFILL)
    one.set_ends(0.25)
    assert most("pab", one, 1.0) == 740
    assert most("dp", one, 1.0) <= 740


def test_a_cached_prefix_uses_no_capacity() -> None:
    """64 tokens of the prompt are in the cache."""
    one = instance(Role.PREFILL, caching=True)
    held = request(0, 65, ttft=1.0)
    pages = one.blocks.take((), 4)
    assert pages is not None
    held.pages = pages
    for place, digest in enumerate(one._kv.digests(held, 64)):
        one.blocks.register(pages[place], digest, b"")
    assert most("pab", one, 1.0) == 990 + 64


def test_the_dp_counts_memory_and_the_prefill_budget_does_not() -> None:
    small = instance(pages=32)  # 512 tokens
    assert most("pab", small, 8.0) > 512
    assert most("dp", small, 8.0) == 511, "on an idle server, a prompt needs pages for itself and one token"
    shared = instance(pages=64)
    shared.add(request(0, 100, ttft=8.0))
    assert 0 < most("dp", shared, 8.0) <= 64 * 16 - (100 + 256) - 256, "an answer is expected to need 256 tokens"


JOB = st.builds(
    lambda prompt, output, arrival, ttft, tpot: Job(
        range(1000 * output, 1000 * output + prompt), output, arrival, SLO(ttft, tpot)
    ),
    prompt=st.integers(1, 60),
    output=st.integers(1, 12),
    arrival=st.floats(0, 0.02),
    ttft=st.sampled_from([0.001, 0.003, 0.01, 1.0]),
    tpot=st.sampled_from([0.0012, 0.003, 0.05]),
)


@given(jobs=st.lists(JOB, min_size=1, max_size=10), name=st.sampled_from(ALL), mesh=st.sampled_from("MPD"))
@settings(max_examples=examples(40))
def test_refused_requests_are_reported_and_demoted_ones_lose_no_token(jobs, name, mesh) -> None:  # type: ignore[no-untyped-def]
    roles = (Role.MIXED,) if mesh == "M" else (Role.PREFILL, Role.DECODE)
    outcome = simulate(jobs, roles, policy="fairbatching", admission=name, pages=40)
    for one, job in zip(outcome.requests, jobs, strict=True):
        [last] = [delta for delta in outcome.deltas[one.id] if delta.finish_reason]
        if one.finish_reason == "refused":
            assert name.endswith(":refuse") and not one.output and one.tier == STANDARD
            assert last.error == one.error and "try again later" in (one.error or "")
        else:
            assert len(one.output) == job.output and (one.tier == STANDARD or name in ("pab", "dp"))


def test_best_effort_needs_no_admission() -> None:
    jobs = [Job(range(50), 4, 0.0, SLO(inf, inf), tier=BEST_EFFORT) for _ in range(4)]
    assert {one.finish_reason for one in simulate(jobs, admission="pab:refuse").requests} == {"stop"}


def test_some_requests_are_refused_or_demoted() -> None:
    jobs = [Job(range(100 * id, 100 * id + 50), 4, 0.0, SLO(0.008, 0.05)) for id in range(6)]
    for name in ("pab", "dp"):  # 2.5 ms each, and 1 ms a step
        tiers = [one.tier for one in simulate(jobs, admission=name, pages=200, tokens=64).requests]
        reasons = [
            one.finish_reason for one in simulate(jobs, admission=f"{name}:refuse", pages=200, tokens=64).requests
        ]
        assert tiers[0] == STANDARD and tiers[-1] == BEST_EFFORT
        assert [tier == BEST_EFFORT for tier in tiers] == [reason == "refused" for reason in reasons]
        assert tiers.count(STANDARD) == 2
