"""`share` of the router `deflect` is the size of the chunks that decode instances take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.sched.recorded.record import Recorder
from jaxserve.sched.recorded.timeline import mixed_steps
from jaxserve.sched.sim import Options, simulate
from jaxserve.sched.sim.workload import Lengths, Workload
from tests.support.sched.presets import TINY

LONG = Workload(
    "long", Lengths("uniform", low=1000, high=2000), Lengths("uniform", low=40, high=80), ttft=0.1, tpot=0.01
)
BIG = replace(TINY, kv_tokens=40_000)
ROUNDS = 1.02  # chunks are whole tokens


def chunks(policy: str, share: float, tpot: float, tbt: float | None) -> list[float]:
    """Return the seconds of the steps with prompts and decodes on decode instances."""
    recorder, options = Recorder(), Options(routing=f"deflect:faster+share={share}", tokens=512)
    workload = replace(LONG, tpot=tpot, tbt=tbt)
    simulate(workload, policy, "4x1", BIG, qps=8, num_requests=30, options=options, recorder=recorder)
    return mixed_steps(recorder)


@pytest.mark.parametrize("policy", ["distserve", "kairos"])
@pytest.mark.parametrize(("tpot", "tbt"), [(0.02, None), (0.04, 0.02)])
def test_the_share_bounds_mixed_steps(policy: str, tpot: float, tbt: float | None) -> None:
    for share in (0.5, 1.0):
        steps, most = sorted(chunks(policy, share, tpot, tbt)), share * 0.02 * ROUNDS
        assert 0.6 * most < steps[len(steps) // 2] and steps[int(0.9 * len(steps))] < most
