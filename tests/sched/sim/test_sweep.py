"""Sweeps over many simulations, and the options of a simulation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.perf import Load
from jaxserve.sched.perf import Perf
from jaxserve.sched.routing import ROUTERS
from jaxserve.sched.sim import Mesh, Options, simulate, sweep
from jaxserve.sched.sim.predict import perf_model
from jaxserve.sched.sim.sweep import goodput_search
from tests.support.sched.presets import CHAT, TINY

QUIET = replace(TINY, noise=0.0)


def test_a_sweep_is_its_simulations_in_order() -> None:
    seen: list[tuple[int, int]] = []
    reports = sweep(
        CHAT,
        ["distserve", "kairos"],
        "2x1",
        TINY,
        rates=[20, 40],
        seeds=[0, 3],
        num_requests=20,
        progress=lambda done, total: seen.append((done, total)),
    )
    cases = [(p, rate, seed) for p in ("distserve", "kairos") for rate in (20, 40) for seed in (0, 3)]
    assert [(one.policy, one.rate, one.seed) for one in reports] == cases
    assert seen == [(n, 8) for n in range(1, 9)]
    assert reports[5] == simulate(CHAT, "kairos", "2x1", TINY, 3, qps=20, num_requests=20)


def test_goodput_holds_at_its_rate_and_not_slightly_above() -> None:
    seen: list[tuple[int, int]] = []
    found = goodput_search(
        CHAT,
        ["distserve", "kairos"],
        "2x1",
        TINY,
        seeds=[0, 1],
        num_requests=30,
        start=200.0,
        tolerance=0.2,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert list(found) == ["distserve", "kairos"]
    for rate, reports in found.values():
        shares: dict[float, list[float]] = {}
        for one in reports:
            shares.setdefault(one.rate, []).append(one.summary.attained)
        assert all(len(each) == 2 for each in shares.values()) and list(shares) == sorted(shares)
        above = min(other for other in shares if other > rate)
        assert sum(shares[rate]) / 2 >= 0.9 > sum(shares[above]) / 2 and above <= rate * 1.2
    assert seen[-1][0] == seen[-1][1] == sum(len(one.reports) for one in found.values())


def test_goodput_that_never_or_always_holds() -> None:
    search = partial(goodput_search, CHAT, ["distserve"], "1x1", TINY, num_requests=5)
    never = search(value=lambda summary: 0.0)["distserve"]
    always = search(value=lambda summary: 1.0)["distserve"]
    assert never.rate == 0.0 and always.rate >= 2.0**16
    with pytest.raises(InvalidValue, match=r"goal=1\.5"):
        search(goal=1.5)
    with pytest.raises(InvalidValue, match="tolerance=0"):
        search(tolerance=0)
    with pytest.raises(InvalidValue, match="start=-1"):
        search(start=-1)


def test_the_stopwatch_counts_every_decision() -> None:
    clock = count()
    options = Options(timer=lambda: float(next(clock)))
    report = simulate(CHAT, "kairos", "1x1", TINY, qps=20, num_requests=20, options=options)
    assert report.decisions is not None and report.decisions.p50 == report.decisions.max == 1.0
    assert next(clock) >= 2 * report.counters.steps
    assert simulate(CHAT, "kairos", "1x1", TINY, qps=20, num_requests=20).decisions is None


@pytest.mark.parametrize("routing", sorted(ROUTERS))
@pytest.mark.parametrize("mesh", [Mesh(4), Mesh(3, colocated=True)], ids=["2P2D", "3 mixed"])
def test_every_router_loses_nothing_on_stale_views(routing: str, mesh: Mesh) -> None:
    options = Options(stale=0.05, routing=routing, routing_delay=0.002)
    report = simulate(CHAT, "kairos", mesh, TINY, qps=150, num_requests=40, options=options)
    assert report.summary.reasons == {"stop": 40}


@pytest.mark.parametrize("perf", ["general", "linear", "table"])
@pytest.mark.parametrize("error", [-0.2, 0.5])
def test_prediction_errors_persist_as_requested(perf: Perf, error: float) -> None:
    model, true = (perf_model(perf, QUIET.solve(), error=wrong) for wrong in (error, 0.0))
    load = Load(decode=4, longest=50, context=120)
    for _ in range(50):
        for one in (model, true):
            one.observe(load, 2e-3)
    assert model.step_time(load) == pytest.approx((1 + error) * true.step_time(load))
    assert model.prefill_rate == pytest.approx(true.prefill_rate / (1 + error))
    rows = np.array([4.0])
    for method, words in (("decode_times", (rows, 10 * rows, 30 * rows)), ("prefill_times", (rows, rows, 8192))):
        assert getattr(model, method)(*words) == pytest.approx((1 + error) * getattr(true, method)(*words))


@pytest.mark.parametrize(
    "wrong",
    [
        {"prediction_error": -1},
        {"kv_scale": 0},
        {"acceptance": 1.1},
        {"draft": -1},
        {"suspended": -1},
        {"prompts": 0},
        {"routing_delay": -0.1},
        {"stale": float("nan")},
        {"fronts": -1},
        {"tokens": 0},
        {"skip": -1},
        {"horizon": 0.0},
    ],
)
def test_invalid_options_are_refused(wrong: dict[str, Any]) -> None:
    [(name, value)] = wrong.items()
    with pytest.raises(InvalidValue, match=f"{name}={value!r} must be"):
        Options(**wrong)
