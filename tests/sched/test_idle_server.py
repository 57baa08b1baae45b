"""An idle server declines no request that it could serve in time alone.

This holds for any prompt, objectives and step-time model, with policy `slos_serve` and admission
`dp`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.sched.admission.dp import ByDP
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.perf import Load, PerfModel
from jaxserve.sched.api.policy import Limits, Role
from jaxserve.sched.api.request import Request, State
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.perf import Perf, make
from jaxserve.sched.perf.buckets import Buckets
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.policies.fcfs import Fcfs
from jaxserve.sched.policies.slos_serve.policy import SlosServe
from jaxserve.sched.sim import Arrival, Latency, Mesh, Options, simulate
from tests.support.examples import examples
from tests.support.sched.views import view

LARGE = Coefficients(fixed=5e-3, prefill=2e-5, decode=1e-5, quadratic=1e-10, longest=1e-8, context=1e-8)
SMALL = Coefficients(fixed=12e-3, prefill=7e-5, decode=1e-5, quadratic=3e-9, longest=1e-7, context=1e-7, draft=1e-3)
STAIRS = Buckets(decode=(1, 8, 64, 256), mixed=(16, 64, 256, 1024, 4096, 8192))
FORMS: tuple[Perf, ...] = ("table", "linear", "roofline", "roofline:published", "poly")


@cache
def fitted() -> list[PerfModel]:
    """Return models of every form, fitted when the first test needs them."""
    return [*(make(kind, truth) for kind in FORMS for truth in (LARGE, SMALL)), make("exact", LARGE, buckets=STAIRS)]


MODEL = st.deferred(lambda: st.sampled_from(fitted())) | st.builds(
    lambda fixed, prefill, decode, quadratic, context, moe: GeneralModel(
        Coefficients(fixed, prefill, decode, quadratic, context, context, w_moe=moe, p_moe=0.1 if moe else 0.0),
        correct=False,
    ),
    fixed=st.floats(1e-5, 0.05),
    prefill=st.floats(1e-6, 1e-3),
    decode=st.floats(0.0, 1e-3),
    quadratic=st.floats(0.0, 1e-6),
    context=st.floats(0.0, 1e-6),
    moe=st.sampled_from([0.0, 0.01]),
)
CASE = st.fixed_dictionaries(
    {
        "perf": MODEL,
        "prompt": st.integers(1, 20_000),
        "times": st.just(1.0) | st.floats(1.0, 10.0),  # its TTFT, as a multiple of the time of the prompt alone
        "slack": st.just(1.0) | st.floats(1.0, 10.0),  # its TPOT, as a multiple of the time of a decode step alone
        "chunk": st.sampled_from([16, 500, 2048, 8192]),
        "role": st.sampled_from([Role.MIXED, Role.PREFILL]),
        "draft": st.sampled_from([0, 3]),
        "share": st.sampled_from([0.0, 0.0, 0.5, 0.99]),  # cached part of the prompt
    }
)


def limits(chunk: int, draft: int) -> Limits:
    return Limits(tokens=chunk, rows=8, pages=1500, page_size=16, draft=draft)


def feasible(perf: PerfModel, prompt: int, times: float, slack: float, chunk: int, hit: int) -> SLO:
    """Return objectives that the request alone can just meet, times the factors `times` and `slack`."""
    own = perf.prefill_times(np.array([float(prompt - hit)]), np.array([float(hit)]), chunk)[0]
    step = perf.decode_times(np.ones(1), np.array([float(prompt)]), np.array([float(prompt)]))[0]
    return SLO(ttft=times * float(own), tpot=slack * float(step))


def waiting(prompt: int, slo: SLO) -> Request:
    return Request(0, NewRequest(range(prompt), SamplingParams(max_tokens=None), slo), 0.0)


def served(policy: SlosServe, one: Request, perf: PerfModel, within: Limits, role: Role) -> float:
    """Return the time to compute the prompt of the only request with steps as predicted by `perf`.

    Fails if the request is demoted.
    """
    now = 0.0
    while one.remaining:
        decision = policy.decide(
            view([one], [], perf=perf, limits=within, free_pages=within.pages, role=role, now=now, start=now)
        )
        assert not decision.demote, f"demoted at {now} s with {one.computed} tokens computed, {one.hit} of them cached"
        [grant] = decision.grants
        if one.state is State.WAITING:
            one.state, one.computed = State.RUNNING, one.hit
        tokens = min(grant.tokens, one.remaining)
        now += float(perf.step_time(Load().add_chunk(tokens, one.computed)))
        one.computed += tokens
    return now


@given(CASE)
@example(
    {
        "perf": GeneralModel(SMALL, correct=False),
        "prompt": 32,
        "times": 3.0,
        "slack": 4.0,
        "chunk": 8192,
        "role": Role.MIXED,
        "draft": 0,
        "share": 0.0,
    }
)
@settings(max_examples=examples(300), deadline=None)
def test_the_policy_demotes_no_request_that_is_feasible_alone(case) -> None:  # type: ignore[no-untyped-def]
    perf, prompt, chunk = case["perf"], case["prompt"], case["chunk"]
    hit = int(case["share"] * prompt)
    one = waiting(prompt, feasible(perf, prompt, case["times"], case["slack"], chunk, hit))
    one.hit = hit
    ended = served(SlosServe(), one, perf, limits(chunk, case["draft"]), case["role"])
    assert ended <= one.slo.ttft + 1e-8


@given(CASE)
@settings(max_examples=examples(200), deadline=None)
def test_the_admission_admits_each_request_that_is_feasible_alone(case) -> None:  # type: ignore[no-untyped-def]
    perf, prompt, chunk = case["perf"], case["prompt"], case["chunk"]
    server = Scheduler(Fcfs(), perf, limits(chunk, case["draft"]), case["role"])
    one = waiting(prompt, feasible(perf, prompt, case["times"], case["slack"], chunk, 0))
    assert ByDP().admits(one, server, 0.0)


@pytest.mark.parametrize(("policy", "admission"), [("slos_serve", "none"), ("fcfs", "dp"), ("slos_serve", "dp")])
@given(
    prompts=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    times=st.floats(1.0, 6.0),
    slack=st.floats(1.0, 6.0),
    truth=st.sampled_from([LARGE, SMALL]),
    tokens=st.sampled_from([256, 8192]),
)
@settings(max_examples=examples(25), deadline=None)
def test_requests_that_arrive_one_by_one_are_all_on_time(  # type: ignore[no-untyped-def]
    policy, admission, prompts, times, slack, truth, tokens
) -> None:
    """In whole runs, each request arrives when the one before has ended, and attains both objectives."""
    perf, answer = GeneralModel(truth, correct=False), 6
    arrivals = []
    for at, prompt in enumerate(prompts):
        slo = feasible(perf, prompt, times, slack, tokens, 0)
        longest = perf.step_time(Load().add_decode(prompt + answer))
        arrivals.append(Arrival(1e3 * at, prompt, answer, replace(slo, tpot=slack * longest)))
    latency = Latency(name="idle", kv_bytes_per_token=1000, kv_tokens=4096, coefficients=truth, noise=0.0)
    name = "distserve" if policy == "fcfs" else policy
    options = Options(perf="exact", admission=admission, tokens=tokens, prefix_caching=False)
    report = simulate(arrivals, name, Mesh(1), latency, options=options)
    assert report.counters.demotions == 0
    for one, arrival in zip(report.measured, arrivals, strict=True):
        assert arrival.slo is not None
        assert one.ttft <= arrival.slo.ttft + 1e-8 and one.tpot <= arrival.slo.tpot + 1e-8


def test_a_configured_block_is_a_share_of_the_median_ttft() -> None:
    """With 0.1 of a second, a prompt of 170 ms is computed in chunks, each with the fixed time of a step."""
    perf = GeneralModel(SMALL, correct=False)
    pieces = served(SlosServe(block=0.1), waiting(2000, SLO(1.0, 1.0)), perf, limits(8192, 0), Role.MIXED)
    assert pieces > served(SlosServe(), waiting(2000, SLO(1.0, 1.0)), perf, limits(8192, 0), Role.MIXED)
    for make_one in (SlosServe, ByDP):
        with pytest.raises(InvalidValue, match=r"block=-0.1 must be 0 \(follow the tightest promise\)"):
            make_one(block=-0.1)
