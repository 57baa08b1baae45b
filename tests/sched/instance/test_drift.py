"""Systematic prediction errors: measured by the scheduler and corrected by `unified`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import load_yaml, preset
from jaxserve.sched.api.perf import Load
from jaxserve.sched.instance.stats import Drift
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.perf.scaled import Scaled
from jaxserve.sched.sim import NAMED, Latency, Options, simulate

MODEL = GeneralModel(Coefficients(fixed=2e-3, prefill=2e-5, decode=1e-4, quadratic=1e-9, longest=1e-7, context=1e-8))


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


def test_a_scaled_model_scales_every_prediction() -> None:
    scaled, load = Scaled(MODEL, 1.25), Load(100, 3, 5e3, 700, 1500, 40)
    assert scaled.step_time(load) == 1.25 * MODEL.step_time(load)
    rows, tokens = np.array([1.0, 4.0]), np.array([10.0, 900.0])
    np.testing.assert_allclose(
        scaled.decode_times(rows, tokens, tokens), 1.25 * MODEL.decode_times(rows, tokens, tokens), rtol=1e-12
    )
    np.testing.assert_allclose(
        scaled.prefill_times(tokens, rows, 64), 1.25 * MODEL.prefill_times(tokens, rows, 64), rtol=1e-12
    )
    assert Scaled(scaled, 0.8).step_time(load) == pytest.approx(MODEL.step_time(load), rel=1e-12)


def test_unified_keeps_its_objectives_with_an_optimistic_model() -> None:
    latency = load_yaml(preset("latency", "minimax-m2.5-h200-tp4"), Latency)
    options = Options(routing="unified")
    right, hopeful = (
        simulate(
            NAMED["K128"], "unified", "2x4", latency, qps=6.0, num_requests=250,
            options=replace(options, prediction_error=error),
        ).summary
        for error in (0.0, -0.2)
    )  # fmt: skip
    assert hopeful.tpot_attained >= right.tpot_attained - 0.02
    assert hopeful.attained >= right.attained - 0.03
