"""An objective for gaps (TBT) is kept, and costs no request its mean time per token (benchmarks/tbt.py)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from math import inf

import pytest

from jaxserve.config import preset
from jaxserve.sched.metrics import ROUNDING, Measured
from jaxserve.sched.sim import NAMED, Latency, Mesh, Workload, simulate
from jaxserve.yamlio import load_yaml
from tests.support.examples import cases

HONOUR = (
    "deadline_edf", "distserve", "edf", "fairbatching", "flowprefill", "kairos", "sarathi", "sedf", "sjf", "slos_serve",
    "unified",
)  # fmt: skip
FEW = [("fairbatching", 0.1), ("sarathi", 0.1), ("slos_serve", 0.1), ("unified", inf)]
LATENCY = load_yaml(preset("latency", "qwen3-14b-h20"), Latency)


@cache
def served(policy: str, tpot: float, tbt: float | None) -> list[Measured]:
    drawn = NAMED["fairbatching-qwen"]
    assert isinstance(drawn, Workload)
    workload, mesh = replace(drawn, ttft=0.5, tpot=tpot, tbt=tbt), Mesh(1, LATENCY.tensor_parallel, colocated=True)
    return list(simulate(workload, policy, mesh, LATENCY, qps=1.55, num_requests=20).measured)


@pytest.mark.parametrize(("policy", "tpot"), cases(FEW, product(HONOUR, (0.1, inf)), apart=True))
def test_a_tbt_is_kept_and_costs_no_tpot(policy: str, tpot: float) -> None:
    with_tbt = served(policy, tpot, 0.08)
    assert sum(one.tbt_attained for one in with_tbt) >= 0.95 * len(with_tbt)
    before, after = (
        [not one.worst_tpot > tpot + ROUNDING for one in some] for some in (served(policy, tpot, None), with_tbt)
    )
    assert sum(after) >= sum(before) - 0.02 * len(before)
