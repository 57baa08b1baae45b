"""A journal of real executors replays to the same plans, under page pressure, faults and migration."""

from __future__ import annotations

import io

import pytest

from jaxserve.cli.replay import perf_of
from jaxserve.sched.journal import Journal, replay
from jaxserve.sched.sim.again import again
from tests.support.parity.asks import ROOMY, TIGHT, asks, setup


@pytest.mark.parametrize(("mesh", "pages", "policy"), [("1x1", TIGHT, "kairos"), ("4x2", ROOMY, "kairos")])
def test_a_served_journal_replays_to_the_same_plans(mesh: str, pages: int, policy: str) -> None:
    file = io.StringIO()
    served, _ = setup(mesh, 64, pages).run(asks(1, cancel=True), policy, journal=Journal(file))
    outcome = replay(file.getvalue().splitlines(), perf_of)
    assert outcome.differences == [] and outcome.plans > 20
    assert [outcome.requests[request.id].output for request in served] == [request.output for request in served]
    done = [request for request in served if request.finish_reason in ("stop", "length")]
    simulated = again(outcome).simulated.measured
    assert sum(one.output for one in simulated) == sum(len(request.output) for request in done) > 0
