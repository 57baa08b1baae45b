"""The bound beside simulations: no policy exceeds it on the servers that the simulation has."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.errors import InvalidValue
from jaxserve.sched.request import BEST_EFFORT
from jaxserve.sched.sim import Arrival, Mesh, Options, simulate
from jaxserve.sched.sim.bounds import bounds, goodput_bounds
from jaxserve.sched.sim.sweep import goodput_search
from jaxserve.sched.slo import SLO

from .test_sim import CHAT, TINY

QUIET = replace(TINY, noise=0.0)
HARD = replace(CHAT, ttft=0.02, tpot=0.003)
MESHES = {"1": Mesh(1), "1P1D": Mesh(2), "2 mixed": Mesh(2, colocated=True), "1P2D": Mesh(3, prefill=1)}


@settings(deadline=None, max_examples=25)
@given(
    mesh=st.sampled_from(sorted(MESHES)),
    policy=st.sampled_from(["distserve", "kairos", "edf", "sarathi", "unified"]),
    qps=st.sampled_from([20.0, 120.0, 400.0]),
    seed=st.integers(0, 20),
    skip=st.sampled_from([0, 5]),
    draft=st.sampled_from([0, 2]),
)
def test_no_policy_attains_more(mesh: str, policy: str, qps: float, seed: int, skip: int, draft: int) -> None:
    options = Options(
        skip=skip, draft=draft, acceptance=1.0, placement="unified" if policy == "unified" else "least_work"
    )
    report = simulate(HARD, policy, MESHES[mesh], QUIET, seed, qps=qps, num_requests=40, options=options)
    [found] = bounds(HARD, MESHES[mesh], QUIET, rates=[qps], seeds=[seed], num_requests=40, options=options)
    assert (found.rate, found.seed, found.bound.requests) == (qps, seed, report.summary.count)
    assert report.summary.attained <= found.bound.share + 1e-9


def test_no_policy_sustains_a_higher_rate() -> None:
    found = goodput_search(
        HARD, ["distserve", "kairos", "edf"], "2x1", QUIET, num_requests=60, start=100.0, tolerance=0.1
    )
    [highest] = goodput_bounds(HARD, "2x1", QUIET, num_requests=60, options=Options(placement="least_work"))
    assert all(0 < one.rate <= highest for one in found.values())


def test_best_effort_is_left_out_of_the_bound() -> None:
    free = SLO(inf, inf)
    paid = [Arrival(0.1 * n, 30, 5, SLO(0.05, 0.01)) for n in range(20)]
    mixed = [one for each in paid for one in (each, replace(each, slo=free, tier=BEST_EFFORT))]
    alone, beside = (next(bounds(each, "1x1", QUIET, rates=[None])).bound for each in (paid, mixed))
    assert alone == beside
    [low], [high] = (goodput_bounds(each, "1x1", QUIET) for each in (paid, mixed))
    assert high == pytest.approx(low * (len(mixed) - 1) / (len(paid) - 1), rel=0.02)


def test_rounds_have_no_bound() -> None:
    rounds = [Arrival(0.0, 30, 5), Arrival(0.0, 40, 5, after=0)]
    with pytest.raises(InvalidValue, match="requests that come in rounds"):
        list(bounds(rounds, "1x1", QUIET, rates=[None]))
