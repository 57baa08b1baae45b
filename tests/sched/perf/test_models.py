"""Step-time models: they reproduce published points, learn from measurements, and survive invalid values."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.perf import Load, PerfModel
from jaxserve.sched.perf.fit import Point, fit, nonnegative, solve
from jaxserve.sched.perf.linear import LinearModel
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.perf.table import TableModel
from jaxserve.sched.sim.latency import Latency
from jaxserve.yamlio import load_yaml

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "latency"
TRUTH = Coefficients(8.7e-3, 4.5e-5, 2e-5, 3e-10, 2.4e-7, 1.5e-8, 11.5e-3, 8 / 256)


def decode(*contexts: int) -> Load:
    load = Load()
    for context in contexts:
        load = load.add_decode(context)
    return load


def loads(count: int, seed: int = 0) -> list[Load]:
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        load = decode(*random.integers(10, 100_000, random.integers(0, 40)).tolist())
        if random.random() < 0.5 or not load.decode:
            load = load.add_chunk(int(random.integers(1, 8192)), int(random.integers(0, 60_000)))
        made.append(load)
    return made


MODELS: dict[str, PerfModel] = {
    "general": GeneralModel(TRUTH),
    "table": TableModel.profiled(GeneralModel(TRUTH)),
    "linear": LinearModel(8e-3, 4e-5, 2e-8),
}


@pytest.mark.parametrize(
    ("boundary", "segments"), [("chunk", 1), ("layer", 62), ("op", 124), ("layers:4", 16), ("layers:62", 1)]
)
def test_boundaries_are_parsed_and_checked(boundary: str, segments: int) -> None:
    preset = load_yaml(CONFIGS / "minimax-m2.5-h200-tp4.yaml", Latency)
    assert preset.segments(boundary) == segments
    with pytest.raises(InvalidValue, match="op, layer, layers:K or chunk"):
        preset.segments("layers:0")


def test_insufficient_points_are_refused() -> None:
    one = Point("decode", 1000, 0.01)
    with pytest.raises(InvalidValue, match="1 points cannot determine"):
        solve([one], {})
    with pytest.raises(InvalidValue, match="cannot tell"):
        solve([one] * 6, {})
    with pytest.raises(InvalidValue, match="negative"):
        solve([one, Point("decode", 2000, 0.005)], dict.fromkeys(("prefill", "decode", "quadratic", "context"), 0.0))
    with pytest.raises(InvalidValue, match="assumed 'speed'"):
        solve([one], {"speed": 1.0})


def test_fit_reports_unexplained_noise() -> None:
    random = np.random.default_rng(0)
    noisy = [(load, TRUTH.step_time(load) * random.lognormal(0, 0.05)) for load in loads(500)]
    fitted = fit(noisy, p_moe=TRUTH.p_moe)
    assert 0.03 < fitted.mape < 0.05 and fitted.worst > fitted.mape
    with pytest.raises(InvalidValue, match="no measured steps"):
        fit([])


def test_nonnegative_least_squares_is_optimal() -> None:
    """The Karush-Kuhn-Tucker conditions hold: zero gradient at positive values, no descent direction at zeros."""
    random = np.random.default_rng(3)
    for _ in range(50):
        table, target = random.normal(size=(30, 6)), random.normal(size=30)
        found = nonnegative(table, target)
        pull = table.T @ (target - table @ found)
        assert np.all(found >= 0)
        assert np.all(np.abs(pull[found > 0]) < 1e-8) and np.all(pull[found == 0] < 1e-8)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_consistent_and_survives_invalid_values(name: str) -> None:
    model = MODELS[name]
    rows = np.array([1.0, 2.0, 40.0])
    longest, total = np.array([500.0, 9000.0, 90_000.0]), np.array([500.0, 9900.0, 250_000.0])
    times = model.decode_times(rows, longest, total)
    for index in range(3):
        load = Load(decode=int(rows[index]), longest=int(longest[index]), context=int(total[index]))
        assert model.step_time(load) == pytest.approx(float(times[index]))
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        model.observe(decode(100), seconds)
        model.observe(Load(), seconds)
    assert model.step_time(decode(100)) > 0 and model.prefill_rate > 0
    assert np.isfinite(model.step_time(decode(100)))


@pytest.mark.parametrize("name", MODELS)
@given(st.integers(0, 200_000), st.integers(0, 200_000), st.integers(1, 9000))
def test_a_prompt_takes_the_sum_of_its_chunks(name: str, tokens: int, context: int, chunk: int) -> None:
    chunk = max(chunk, tokens // 50)
    steps = [Load().add_chunk(min(chunk, tokens - done), context + done) for done in range(0, tokens, chunk)]
    together = MODELS[name].prefill_times(np.array([float(tokens)]), np.array([float(context)]), chunk)
    assert together.shape == (1,)
    assert float(together[0]) == pytest.approx(sum(map(MODELS[name].step_time, steps)), rel=1e-9)


@pytest.mark.parametrize("p_moe", [0.0, 1e-3, 0.999, 1.0])
def test_the_weights_of_each_expert_are_read_at_most_once(p_moe: float) -> None:
    model = Coefficients(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, w_moe=1.0, p_moe=p_moe)
    tokens = np.array([0.0, 1.0, 7.0, 8.0, 20.0])
    steps = [[], [1], [7], [8], [8, 8, 4]]
    expected = [sum(1 - (1 - p_moe) ** k for k in parts) for parts in steps]
    assert model.prefill_times(tokens, np.zeros(5), 8) == pytest.approx(expected, rel=1e-9)
    with pytest.raises(InvalidValue, match=r"p_moe=1\.5 must be at most 1"):
        Coefficients(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, p_moe=1.5)


@pytest.mark.parametrize("name", MODELS)
def test_prefill_rate_follows_steps_without_decodes(name: str) -> None:
    model = {
        "general": lambda: GeneralModel(TRUTH),
        "table": lambda: TableModel.profiled(GeneralModel(TRUTH)),
        "linear": lambda: LinearModel(8e-3, 4e-5, 2e-8),
    }[name]()
    before = model.prefill_rate
    model.observe(decode(100).add_chunk(1000, 0), 100.0)
    assert model.prefill_rate == before
    for _ in range(200):
        model.observe(Load().add_chunk(1000, 0), 0.5)
    assert model.prefill_rate == pytest.approx(2000, rel=1e-3)


def test_table_is_exact_at_its_entries_and_between_neighbors() -> None:
    truth = GeneralModel(TRUTH)
    table = TableModel.profiled(truth)
    for batch, length in ((1, 8192), (32, 131072), (256, 256)):
        load = Load(decode=batch, longest=length, context=batch * length)
        assert table.step_time(load) == pytest.approx(truth.step_time(load))
    low, mid, high = (table.step_time(Load(decode=4, longest=length)) for length in (8192, 10_000, 16_384))
    assert low < mid < high
    assert table.step_time(Load(decode=999, longest=10**7)) == table.step_time(Load(decode=256, longest=131072))
    nearest = TableModel.profiled(truth, lookup="nearest")
    assert nearest.step_time(Load(decode=4, longest=10_000)) == nearest.step_time(Load(decode=4, longest=8192))


@given(st.integers(1, 400), st.integers(1, 200_000), st.sampled_from(["bilinear", "nearest"]))
def test_single_and_batched_table_lookups_agree(
    batch: int, longest: int, lookup: Literal["bilinear", "nearest"]
) -> None:
    """A single step is looked up without numpy, with bitwise equal results."""
    table = TableModel.profiled(GeneralModel(TRUTH), lookup=lookup)
    (one,) = table.decode_times(np.array([batch]), np.array([longest]), np.array([batch * longest]))
    assert table.step_time(Load(decode=batch, longest=longest, context=batch * longest)) == one


def test_table_learns_by_mean_or_moving_average() -> None:
    load = Load(decode=4, longest=8192)
    slow, quick = (TableModel.profiled(GeneralModel(TRUTH), ewma=ewma) for ewma in (None, 0.2))
    before = slow.step_time(load)
    for model in (slow, quick):
        for _ in range(100):
            model.observe(load, 2 * before)
    assert slow.step_time(load) == pytest.approx(1.5 * before)  # 100 profiling runs and 100 steps
    assert quick.step_time(load) == pytest.approx(2 * before, rel=1e-3)
