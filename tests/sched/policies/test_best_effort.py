"""Under overload, requests that were promised something come before those that asked for best effort, late or not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.sched.api.request import BEST_EFFORT
from jaxserve.sched.sim import Mesh, simulate
from jaxserve.sched.sim.arrival import best_effort
from tests.support.examples import cases
from tests.support.sched.presets import CHAT, TINY

FEW = ["kairos", "unified"]
OTHERS = ["distserve", "edf", "fairbatching", "flowprefill", "sarathi", "sjf", "slos_serve"]


@pytest.mark.parametrize("policy", cases(FEW, OTHERS))
def test_what_is_late_still_comes_before_best_effort(policy: str) -> None:
    """At several times of what the instance carries nearly all are late, and are demoted to best effort."""
    arrivals = best_effort(replace(CHAT, ttft=0.05).draw(150, 400.0, 0), 0.4)
    report = simulate(arrivals, policy, Mesh(1, colocated=True), TINY)
    ended = {True: [], False: []}  # seconds until the last token
    for one in report.measured:
        ended[arrivals[one.id].tier == BEST_EFFORT].append(one.ended - one.arrival)
    assert max(ended[False]) < max(ended[True])
    assert sorted(ended[False])[int(0.9 * len(ended[False]))] < 0.8 * sorted(ended[True])[len(ended[True]) // 2]
