"""The clairvoyant bound beside simulations: no policy exceeds it on the simulated servers."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.request import BEST_EFFORT
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.sim import Arrival, Options, simulate
from jaxserve.sched.sim.bounds import bounds, goodput_bounds
from jaxserve.sched.sim.oracle import Details, goodput_bound, sustained_bound
from jaxserve.sched.sim.sweep import goodput_search
from tests.support.sched.presets import CHAT, TINY

QUIET = replace(TINY, noise=0.0)
HARD = replace(CHAT, ttft=0.02, tpot=0.003)


def test_no_policy_sustains_a_higher_rate() -> None:
    found = goodput_search(
        HARD, ["distserve", "kairos", "edf"], "2x1", QUIET, num_requests=60, start=100.0, tolerance=0.1
    )
    [highest] = goodput_bounds(HARD, "2x1", QUIET, num_requests=60, options=Options(routing="least_work"))
    assert all(0 < one.rate <= highest for one in found.values())


def test_the_bound_ignores_best_effort() -> None:
    free = SLO(inf, inf)
    paid = [Arrival(0.1 * n, 30, 5, SLO(0.05, 0.01)) for n in range(20)]
    mixed = [one for each in paid for one in (each, replace(each, slo=free, tier=BEST_EFFORT))]
    alone, beside = (next(bounds(each, "1x1", QUIET, rates=[None])).bound for each in (paid, mixed))
    assert alone == beside
    [low], [high] = (goodput_bounds(each, "1x1", QUIET) for each in (paid, mixed))
    assert high == pytest.approx(low * (len(mixed) - 1) / (len(paid) - 1), rel=0.02)


def test_conversations_have_no_bound() -> None:
    rounds = [Arrival(0.0, 30, 5), Arrival(0.0, 40, 5, after=0)]
    with pytest.raises(InvalidValue, match="requests that come in rounds"):
        list(bounds(rounds, "1x1", QUIET, rates=[None]))


SECONDS = Coefficients(0.0, 1.0, 0.0, 0.0, 0.0, 0.0)  # one second per prompt token


def test_the_sustained_bound_is_limited_by_server_time() -> None:
    """Of ten requests nine must be on time, at best the nine of one second each and not the one of three."""
    mixed = [Arrival(float(n), 3 if n % 10 == 0 else 1, 1) for n in range(100)]
    for servers in (1, 2):
        rate = sustained_bound(mixed, SECONDS, servers, 0, deflection=False, chunk=8)
        assert rate == pytest.approx(servers / 0.9)
    assert sustained_bound(mixed, SECONDS, 1, 0, deflection=False, chunk=8, goal=1.0) == pytest.approx(1 / 1.2)
    assert sustained_bound(mixed, SECONDS, 1, 1, deflection=True, chunk=8) == pytest.approx(2 / 0.9)
    late = [replace(one, slo=SLO(0.5)) for one in mixed]
    assert sustained_bound(late, SECONDS, 1, 0, deflection=False, chunk=8) == 0.0
    with pytest.raises(InvalidValue, match="no server to compute"):
        sustained_bound(mixed, SECONDS, 0, 2, deflection=False, chunk=8)


@pytest.mark.parametrize("deflection", [False, True])
def test_the_bound_of_a_long_load_approaches_the_sustained_bound(deflection: bool) -> None:
    arrivals = HARD.draw(60, 100.0, 0)
    span = arrivals[-1].time + 0.01
    shape = {"deflection": deflection, "chunk": 8192, "details": Details(rows=16, prefix_caching=False)}
    found = []
    for times in (1, 4):
        load = [replace(one, time=one.time + span * turn) for turn in range(times) for one in arrivals]
        found.append(goodput_bound(load, QUIET.solve(), 1, 1, **shape))  # type: ignore[arg-type]
    endless = sustained_bound(arrivals, QUIET.solve(), 1, 1, **shape)  # type: ignore[arg-type]
    assert endless * 0.99 < found[1] < found[0]


@pytest.mark.parametrize("policy", ["distserve", "unified"])
def test_no_policy_attains_the_goal_well_above_the_sustained_bound(policy: str) -> None:
    """At 1.5 times the rate, without the first and last requests, which find an idle server."""
    arrivals = HARD.draw(150, 100.0, 1)
    limits = Details(kv_tokens=QUIET.kv_tokens)
    rate = sustained_bound(arrivals, QUIET.solve(), 0, 2, deflection=True, chunk=8192, details=limits)
    options = Options(skip=25, routing="unified" if policy == "unified" else "least_work")
    assert simulate(arrivals, policy, "2x1", QUIET, qps=1.5 * rate, options=options).summary.attained < 0.9
