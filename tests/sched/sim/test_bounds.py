"""The clairvoyant bound beside simulations: no policy exceeds it, and wider SLOs never hurt SLO-blind policies."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.request import BEST_EFFORT
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.sim import Arrival, Latency, Mesh, Options, Report, simulate
from jaxserve.sched.sim.bounds import bounds, goodput_bounds
from jaxserve.sched.sim.oracle import Details, bound, sustained_bound
from jaxserve.sched.sim.workload import scale_slo
from tests.support.examples import examples
from tests.support.sched.cases import ADMISSIONS, POLICIES, ROUTERS
from tests.support.sched.presets import CHAT, TINY

QUIET = replace(TINY, noise=0.0)
HARD = replace(CHAT, ttft=0.02, tpot=0.003)


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


@pytest.mark.parametrize("policy", ["distserve", "unified"])
def test_no_policy_attains_the_goal_well_above_the_sustained_bound(policy: str) -> None:
    """At 1.5 times the rate, without the first and last requests, which find an idle server."""
    arrivals = HARD.draw(150, 100.0, 1)
    limits = Details(kv_tokens=QUIET.kv_tokens)
    rate = sustained_bound(arrivals, QUIET.solve(), 0, 2, deflection=True, chunk=8192, details=limits)
    options = Options(skip=25, routing="unified" if policy == "unified" else "least_work")
    assert simulate(arrivals, policy, "2x1", QUIET, qps=1.5 * rate, options=options).summary.attained < 0.9


EXACT = Coefficients(1e-3, 1e-4, 1e-5, 1e-8, 1e-7, 1e-8)
TINY = Latency("tiny", kv_bytes_per_token=1000, kv_tokens=400, page_size=4, coefficients=EXACT, link_bandwidth=1e9)
MESHES = {"1": Mesh(1), "1P1D": Mesh(2), "2P2D": Mesh(4), "2 mixed": Mesh(2, colocated=True)}
HALVES = ["distserve", "sjf", "prefill=fcfs,decode=continuous"]  # blind to the SLO except for the bound of mixed steps
BLIND = [(policy, mesh) for policy in HALVES for mesh in MESHES if "P" in mesh]
BLIND += [(policy, mesh) for policy in ("vllm", "sarathi:tokens=16") for mesh in MESHES]


def drawn(seed: object, count: int = 24) -> list[Arrival]:
    """Return requests with tight TTFTs that arrive faster than one instance can serve them; some share a prefix."""
    draw, time, arrivals = random.Random(str(seed)), 0.0, []
    for _ in range(count):
        time += draw.expovariate(400.0)
        slo = SLO(draw.choice([0.004, 0.01, 0.03, 0.1]), draw.choice([0.0013, 0.0016, 0.003, 0.02]))
        tier = BEST_EFFORT if draw.random() < 0.1 else "standard"
        slo = SLO(inf, inf) if tier == BEST_EFFORT else slo
        shared = tuple(draw.choices(range(4), k=draw.randint(1, 6))) if draw.random() < 0.3 else ()
        prompt, output = draw.randint(1, 80), draw.randint(1, 20)
        arrivals.append(Arrival(time, prompt, output, slo, tier=tier, hash_ids=shared, block=8.0))
    return arrivals


def check_bound(policy: str, mesh: str, routing: str, admission: str, **more: Any) -> None:
    """Check a run against the bound for its servers.

    Decode instances count for prompts only if the router sends them some, and prefill instances
    decode if the router changes roles.
    """
    arrivals = drawn((policy, mesh, routing, admission))
    options = Options(routing=routing, admission=admission, tokens=64, rows=8, **more)
    report = simulate(arrivals, policy, MESHES[mesh], TINY, options=options)
    attained = sum(one.attained for one in report.measured if one.promised)
    [found] = bounds(arrivals, MESHES[mesh], TINY, rates=[None], options=options)
    assert attained <= found.bound.attained
    prefill = sum(role.value == "prefill" for role in MESHES[mesh].roles) if routing != "unified" else 0
    stays = prefill and not routing.startswith("deflect")
    kept = [one for one in arrivals if one.tier != BEST_EFFORT]
    details = Details(rows=8, draft=options.draft, kv_tokens=400)
    servers = prefill, MESHES[mesh].instances - prefill
    same = bound(kept, EXACT, *servers, deflection=not stays, chunk=64, details=details)
    assert found.bound == same


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_exceeds_the_bound(policy: str) -> None:
    turn = POLICIES.index(policy)
    for n, mesh in enumerate(MESHES):
        turn += 1
        check_bound(policy, mesh, ROUTERS[turn % len(ROUTERS)], ADMISSIONS[(turn + n) % 4], draft=turn % 2 * 2)


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_exceeds_the_bound_anywhere(policy: str) -> None:
    for mesh, routing, admission in product(MESHES, ROUTERS, ADMISSIONS):
        check_bound(policy, mesh, routing, admission)


def test_the_bound_can_be_reached() -> None:
    """Otherwise the bound would be trivial."""
    arrivals = [Arrival(0.1 * n, 20, 5, SLO(0.01, 0.01)) for n in range(6)]
    [found] = bounds(arrivals, "1x1", TINY, rates=[None])
    assert simulate(arrivals, "distserve", "1x1", TINY).summary.attained == found.bound.share == 1.0
    hard = [Arrival(0.0, 60, 1, SLO(0.015, inf)) for _ in range(4)]  # 7 ms each, one a step
    [found] = bounds(hard, "1x1", TINY, rates=[None])
    report = simulate(hard, "distserve", "1x1", TINY, options=Options(prompts=1))
    assert found.bound.attained == sum(one.attained for one in report.measured) == 2


@settings(max_examples=examples(25))
@given(
    blind=st.sampled_from(BLIND),
    routing=st.sampled_from(["fewest_requests", "least_work", "round_robin"]),
    seed=st.integers(0, 10_000),
    ttft=st.floats(1.0, 20.0),
    tpot=st.floats(1.0, 20.0),
)
def test_wider_slos_never_hurt_an_slo_blind_policy(blind, routing, seed, ttft, tpot) -> None:  # type: ignore[no-untyped-def]
    """Given room for all KV, since dropped KV makes mixed steps depend on the SLO.

    A request with dropped KV on a decode instance is recomputed beside decodes in the time left by
    the tightest TPOT, so there even a blind policy depends on SLOs.
    """

    policy, mesh = blind

    def run(arrivals: list[Arrival]) -> Report:
        options = Options(routing=routing, tokens=64, rows=32, pages=2000)
        return simulate(arrivals, policy, MESHES[mesh], TINY, options=options)

    arrivals = drawn(seed)
    tight, wide = run(arrivals), run(scale_slo(arrivals, ttft=ttft, tpot=tpot))
    assert tight.counters.preemptions == 0
    before, after = ({one.id: one for one in each.measured} for each in (tight, wide))
    for id, one in before.items():
        same = after[id]
        assert (one.ttft, one.ended, one.largest_gap) == pytest.approx(
            (same.ttft, same.ended, same.largest_gap), abs=0, nan_ok=True
        )
        assert one.attained <= same.attained
    assert tight.summary.attained <= wide.summary.attained
