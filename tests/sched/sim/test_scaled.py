"""Simulated replicas that start and stop with the load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.sim import Arrival, simulate
from jaxserve.sched.sim.options import Mesh, Options, Scaling
from tests.support.sched.presets import TINY

# 30 ms a step, 0.2 ms a prompt token
LATENCY = replace(TINY, kv_tokens=200_000, page_size=16, coefficients=Coefficients(0.03, 2e-4, 1e-4, 0.0, 0.0, 0.0))
SLOW, FAST = 0.5, 10.0  # requests per second


def load() -> list[Arrival]:
    """Return 20 quiet seconds, 20 busy ones, and 20 quiet ones."""
    times: list[float] = []
    for begin, rate in ((0, SLOW), (20, FAST), (40, SLOW)):
        times += [begin + at / rate for at in range(int(20 * rate))]
    return [Arrival(time, 2000, 40, SLO(ttft=4.0, tpot=0.2)) for time in times]


def run(scaler: str, **more: float) -> tuple[object, float, float]:
    options = Options(scaling=Scaling(scaler, startup=5.0, period=2.0, hold=15.0, **more))  # type: ignore[arg-type]
    report = simulate(load(), "unified", Mesh(6, colocated=True), LATENCY, options=options)
    return report.summary.reasons, report.replica_seconds, report.ended


@pytest.mark.parametrize("scaler", ["budget", "requests:target=8"])
def test_no_request_is_lost_and_replicas_follow_the_load(scaler: str) -> None:
    reasons, seconds, ended = run(scaler)
    assert reasons == {"stop": len(load())}
    assert ended < seconds < 6 * ended  # more than one replica, fewer than all
    assert run(scaler) == (reasons, seconds, ended)


def test_without_scaling_all_replicas_cost() -> None:
    report = simulate(load()[:40], "unified", Mesh(3, colocated=True), LATENCY)
    assert report.replica_seconds == pytest.approx(3 * report.ended)


@pytest.mark.parametrize("begin", [0, 7])
def test_the_first_replicas_must_be_in_the_mesh(begin: int) -> None:
    with pytest.raises(InvalidValue, match=f"begin={begin}"):
        run("budget", begin=begin)


def test_scaling_needs_mixed_instances() -> None:
    with pytest.raises(InvalidValue, match="colocated"):
        simulate(load()[:4], "unified", Mesh(4), LATENCY, options=Options(scaling=Scaling()))
