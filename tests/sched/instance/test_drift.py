"""Systematic prediction errors: measured by the scheduler and corrected by `unified`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import load_yaml, preset
from jaxserve.sched.instance.stats import Drift
from jaxserve.sched.sim import NAMED, Latency, Options, simulate


@given(st.floats(0.3, 3.0), st.lists(st.floats(1e-3, 1.0), min_size=300, max_size=400))
def test_a_constant_factor_is_found(factor: float, steps: list[float]) -> None:
    drift = Drift()
    for seconds in steps:
        drift.count(seconds, factor * seconds)
    assert drift.ratio == pytest.approx(factor, rel=0.025)


@given(st.floats(-0.019, 0.019), st.lists(st.floats(1e-3, 1.0), max_size=50))
def test_small_errors_count_as_none(error: float, steps: list[float]) -> None:
    drift = Drift()
    for seconds in steps:
        drift.count(seconds, (1 + error) * seconds)
        assert drift.ratio == 1.0


def test_unified_keeps_its_objectives_with_an_optimistic_model() -> None:
    latency = load_yaml(preset("latency", "minimax-m2.5-h200-tp4"), Latency)
    options = Options(routing="unified")
    right, hopeful = (
        simulate(
            NAMED["K128"], "unified", "2x4", latency, qps=6.0, num_requests=100,
            options=replace(options, prediction_error=error),
        ).summary
        for error in (0.0, -0.2)
    )  # fmt: skip
    assert hopeful.tpot_attained >= right.tpot_attained - 0.02
    assert hopeful.attained >= right.attained - 0.03
