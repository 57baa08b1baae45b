"""Simulated fronts: each counts what it sent itself, and none sees what the others sent lately."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.recorded.record import Recorder
from jaxserve.sched.routing import ROUTERS
from jaxserve.sched.sim import Arrival, Mesh, Options, simulate
from tests.support.examples import examples
from tests.support.sched.presets import CHAT, TINY

MIXED = st.integers(1, 5).map(lambda count: Mesh(count, colocated=True))
SPLIT = st.integers(2, 5).map(Mesh)
ROUTER = st.sampled_from(sorted(ROUTERS))
DELAY = st.sampled_from([0.0, 0.002, 0.02])  # seconds from arrival to instance


@given(
    router=ROUTER,
    mesh=MIXED | SPLIT,
    fronts=st.integers(1, 6),
    age=st.sampled_from([0.0, 0.01, 0.2]),
    delay=DELAY,
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(24), deadline=None)
def test_fronts_lose_no_request_and_repeat(
    router: str, mesh: Mesh, fronts: int, age: float, delay: float, seed: int
) -> None:
    options = Options(routing=router, fronts=fronts, stale=age, routing_delay=delay)
    first, again = (
        simulate(CHAT, "kairos", mesh, TINY, seed, qps=150, num_requests=15, options=options) for _ in range(2)
    )
    assert first.summary.reasons == {"stop": 15}
    assert first == again


@given(router=ROUTER, mesh=MIXED, delay=DELAY, seed=st.integers(0, 99))
@settings(max_examples=examples(24), deadline=None)
def test_one_front_that_sees_everything_is_the_plain_router(router: str, mesh: Mesh, delay: float, seed: int) -> None:
    """On mixed instances, where a router moves nothing that it has sent, and so few that it sees them all."""
    front, plain = (
        simulate(
            CHAT, "kairos", mesh, TINY, seed, qps=150, num_requests=15,
            options=Options(routing=router, fronts=fronts, routing_delay=delay),
        )
        for fronts in (1, 0)
    )  # fmt: skip
    assert front == plain


@pytest.mark.parametrize("router", sorted(ROUTERS))
@pytest.mark.parametrize("fronts", [1, 4, 16])
def test_fronts_that_do_not_see_each_other_spread_requests(router: str, fronts: int) -> None:
    """One front fills instances in turn by what it sent; several draw, and do not meet on the first instance."""
    recorder = Recorder()
    arrivals = [Arrival(0.001 * at, 40, 1) for at in range(16)]
    options = Options(routing=router, fronts=fronts, stale=1.0)
    simulate(arrivals, "kairos", Mesh(16, colocated=True), replace(TINY, noise=0.0), options=options, recorder=recorder)
    counts = Counter(placed.instance for placed in recorder.placed)
    assert sum(counts.values()) == 16
    assert max(counts.values()) == 1 if fronts == 1 else len(counts) >= 8
