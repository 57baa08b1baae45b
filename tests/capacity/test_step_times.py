"""Step times for planning: those derived here equal the derived presets, and a fitted preset is preferred."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.capacity.costs import Costs
from jaxserve.capacity.devices import Device, devices
from jaxserve.capacity.fit import Fit, Setting
from jaxserve.capacity.step_times import EFFICIENCIES, load_preset, step_times
from jaxserve.errors import InvalidValue
from jaxserve.models.published import published_spec
from jaxserve.sched.api.perf import Load

A800 = Device("A800", "gpu", 80e9, 2039e9, 312e12, 200e9, "a test")


def fit_of(model: str, tp: int) -> Fit:
    costs = Costs.of(published_spec(model), tp, "bfloat16")
    return Fit(1, tp, costs, None, 0, 1000, 64, None, "")


def setting(device: Device, name: str) -> Setting:
    return Setting(device, name, 8, 8192, 256, 8192, 64, 0.9, None, "bfloat16", "auto", 2048, 2048, 0.05)


@pytest.mark.parametrize(
    ("model", "name", "tp"),
    [("llama3-8b", "llama3-8b-a800", 1), ("llama3-70b", "llama3-70b-a800-tp4", 4)],
)
def test_derived_times_are_those_of_the_derived_presets(model: str, name: str, tp: int) -> None:
    made, written = step_times([], setting(A800, "a800"), fit_of(model, tp)).latency, load_preset(name)
    assert made.derived is not None and written.derived is not None
    for field in ("flops", "bandwidth", "compute", "memory", "parameters", "weights", "attention", "kv", "overhead"):
        assert getattr(made.derived, field) == pytest.approx(getattr(written.derived, field), rel=0.03), field
    assert (made.kv_bytes_per_token, made.layers, made.error) == (written.kv_bytes_per_token, written.layers, 0.25)
    assert made.kv_tokens == 64_000  # those of the fit


def test_derived_times_of_experts_beside_those_that_kairos_publishes() -> None:
    """The ratios that the docstring and docs/guide/plan.md state."""
    made = step_times([], setting(devices()["h200"], "h200"), fit_of("minimax-m2", 4))
    truth, fitted = made.latency.solve(), load_preset("minimax-m2.5-h200-tp4").solve()
    ratios = []
    for tokens in (8192, 131072):
        each = (one.prefill_times(np.array([float(tokens)]), np.zeros(1), 8192)[0] for one in (truth, fitted))
        ratios.append(next(each) / next(each))
    for tokens in (8192, 131072):
        alone = Load().add_decode(tokens)
        ratios.append(truth.step_time(alone) / fitted.step_time(alone))
    assert ratios == pytest.approx([0.51, 1.05, 0.54, 0.20], abs=0.02)
    assert made.error == 1.0 and "derived" in made.source and "ASSUMED" in made.source


def test_a_fitted_preset_of_the_same_pair_is_preferred_and_scaled_to_another_t() -> None:
    here, names = setting(devices()["h200"], "h200"), ["minimax-m2.5", "MiniMaxAI/MiniMax-M2.5", "MiniMax-M2.5"]
    four, eight = (step_times(names, here, fit_of("minimax-m2.5", tp)) for tp in (4, 8))
    fitted = load_preset("minimax-m2.5-h200-tp4")
    assert four.latency.solve() == fitted.solve() and four.source.startswith("preset minimax-m2.5-h200-tp4")
    assert "scaled from T=4" in eight.source and eight.error == 1.0
    assert 0.5 < eight.latency.solve().prefill / fitted.solve().prefill < 0.6
    assert eight.latency.tensor_parallel == 8
    other = step_times(names, setting(devices()["h100"], "h100"), fit_of("minimax-m2.5", 4))
    assert "derived from data sheets" in other.source


def test_a_given_preset_is_used() -> None:
    mine = replace(load_preset("llama3-8b-a800"), error=0.05)
    made = step_times([], setting(A800, "a800"), fit_of("llama3-8b", 1), mine)
    assert made.error == 0.05 and made.latency.solve() == mine.solve()
    with pytest.raises(InvalidValue, match="no latency preset 'llama3'"):
        load_preset("llama3")


def test_every_efficiency_states_its_source() -> None:
    assert all(one.source.startswith("ASSUMED") and one.error > 0 for one in EFFICIENCIES.values())
