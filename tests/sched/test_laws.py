"""Laws for every policy, router and admission, on every mesh, over random small workloads.

The bare run draws a few workloads for each policy, and every pair of mesh, router and admission
occurs with some policy; `-m full` runs the whole matrix.
"""

from __future__ import annotations

import random
from itertools import combinations, product
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched import policies
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.policy import Decision, Limits, Role, View, in_order
from jaxserve.sched.api.request import BEST_EFFORT, Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.request_queues import RequestQueue
from jaxserve.sched.perf.model import GeneralModel
from tests.support.examples import examples
from tests.support.sched.cases import (
    ADMISSIONS,
    JOBS,
    MESHES,
    POLICIES,
    ROUTERS,
    SHAPE,
    Case,
    drawn,
)
from tests.support.sched.harness import COEFFICIENTS, Job, Outcome
from tests.support.sched.laws import REQUEST, Watch, check_laws, first_difference, sealed

CASES: list[Case] = list(product(MESHES, ROUTERS, ADMISSIONS))


def sample(policy: str, count: int = 2) -> list[Case]:
    """Return a few cases for a policy; every pair of mesh, router and admission occurs with some policy."""
    meshes = list(MESHES)
    return [
        (meshes[n % 5], ROUTERS[n // 5 % 10], ADMISSIONS[(n + n // 10) % 4])
        for n in range(count * POLICIES.index(policy), count * (POLICIES.index(policy) + 1))
    ]


def test_the_sample_meets_every_pair() -> None:
    cases = [case for policy in POLICIES for case in sample(policy)]
    for one, other in combinations(range(3), 2):
        assert {(case[one], case[other]) for case in cases} == {(case[one], case[other]) for case in CASES}


def serve(policy: str, case: Case, jobs: list[Job], shape: dict[str, Any]) -> tuple[Watch, Outcome]:
    mesh, routing, admission = case
    watch = Watch(policy, seal=False)
    return watch, watch.run(jobs, MESHES[mesh], routing=routing, admission=admission, **shape)


@settings(max_examples=examples(25))
@given(policy=st.sampled_from(POLICIES), case=st.sampled_from(CASES), jobs=JOBS, shape=SHAPE)
def test_no_request_is_lost_and_no_instance_idles(policy, case, jobs, shape) -> None:  # type: ignore[no-untyped-def]
    check_laws(policy, case, jobs, shape)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_laws_hold_for_every_policy(policy: str) -> None:
    for case in sample(policy):
        check_laws(policy, case, *drawn((policy, case)))


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
def test_the_laws_hold_everywhere(policy: str) -> None:
    for case in CASES:
        jobs, shape = drawn((policy, case, "full"))
        check_laws(policy, case, jobs, shape)
        check_blind(policy, case, jobs, permuted(jobs, shuffled(len(jobs))), shape)


def test_best_effort_that_holds_pages_does_not_block_an_instance() -> None:
    """Regression: best effort with pages gave way to an older prompt that was first in order and did not fit."""
    policy, case = "unified:no-preempt", ("1P1D", "prefill_budget", "pab")
    check_laws(policy, case, *drawn((policy, case, "full")))


def permuted(jobs: list[Job], places: list[int]) -> list[Job]:
    """Return the same requests with permuted hidden output lengths."""
    return [
        Job(job.prompt, jobs[place].output, job.arrival, job.slo, tier=job.tier)
        for job, place in zip(jobs, places, strict=True)
    ]


def check_blind(policy: str, case: Case, jobs: list[Job], others: list[Job], shape: dict[str, Any]) -> float:
    """Check that plans are equal until output lengths differ observably, and return that time."""
    (watch, outcome), (other, same) = (serve(policy, case, each, shape) for each in (jobs, others))
    shows = first_difference(outcome, same)
    mine, theirs = ([one for one in each.records if one[0] < shows] for each in (watch, other))
    assert mine == theirs
    return shows


def shuffled(count: int) -> list[int]:
    return random.Random(count).sample(range(count), count)


@settings(max_examples=examples(25))
@given(policy=st.sampled_from(POLICIES), case=st.sampled_from(CASES), jobs=JOBS, shape=SHAPE, data=st.data())
def test_no_policy_sees_an_output_length(policy, case, jobs, shape, data) -> None:  # type: ignore[no-untyped-def]
    places = data.draw(st.permutations(range(len(jobs))))
    check_blind(policy, case, jobs, permuted(jobs, places), shape)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_knows_when_a_request_ends(policy: str) -> None:
    case = sample(policy)[0]
    jobs, shape = drawn((policy, "blind"))
    assert check_blind(policy, case, jobs, permuted(jobs, shuffled(len(jobs))), shape) < inf


def test_requests_behind_a_rerouted_prompt_are_planned_again() -> None:
    """Found by the full matrix: no new plan was made after a waiting prompt had left."""
    case = ("1P1D", "deflect:dropped", "pab:refuse")
    jobs, shape = drawn(("kairos", case, "full"))
    serve("kairos", case, permuted(jobs, shuffled(len(jobs))), shape)


class Lazy:
    """A policy that runs nothing before its time."""

    def decide(self, view: View) -> Decision:
        return Decision(in_order(view.prefill, np.arange(len(view.prefill)), view.limits) if view.now > 0.02 else ())


def test_the_watch_detects_an_idle_instance_and_access_beyond_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [Job(range(9), 1, arrival) for arrival in (0.0, 0.03)]
    monkeypatch.setattr(policies, "make", lambda name: Lazy())
    with pytest.raises(AssertionError, match=r"idle at .*wants none of"):
        serve("lazy", ("1", "least_work", "none"), jobs, {})
    table = RequestQueue()
    table.add(Request(0, NewRequest(range(5), SamplingParams(max_tokens=3), SLO()), 0.0))
    view = View(0.0, 0.0, Role.MIXED, table, RequestQueue(), Limits(pages=9), 9, 256, 0, GeneralModel(COEFFICIENTS))
    seen = sealed(view)
    assert seen.prefill[0].remaining == seen.prefill.remaining[0] == 5
    for look in (
        lambda: seen.prefill[0].limit,
        lambda: seen.prefill[0].params,
        lambda: next(iter(seen.prefill)).output,
        lambda: seen.prefill._requests,
        lambda: seen.perf.observe,
    ):
        with pytest.raises(AssertionError, match="accesses"):
            look()
    with pytest.raises(AssertionError, match="writes 'tier'"):
        seen.prefill[0].tier = BEST_EFFORT


def test_the_protocol_has_no_output_length() -> None:
    hidden = {"eos", "limit", "output", "params", "prompt", "seed", "token_times"}
    assert not REQUEST & hidden and hidden < set(Request.__slots__)
