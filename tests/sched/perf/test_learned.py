"""The learned step-time model: exact for its own form, quick to follow changes, and robust to outliers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.policy import Limits
from jaxserve.sched.perf.buckets import NONE, Buckets, Padded
from jaxserve.sched.perf.fit import LINEAR, kind
from jaxserve.sched.perf.learned import LearnedModel
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.perf.profile import priced, probes
from jaxserve.sched.perf.recipe import Recipe
from jaxserve.sched.perf.registry import samples

TRUTH = Coefficients(8.7e-3, 4.5e-5, 2e-5, 3e-10, 2.4e-7, 1.5e-8, 11.5e-3, 8 / 256)
ENGINE = Buckets((1, 8, 32, 128, 256), (64, 512, 2048, 8192))
LIMITS = Limits(8192, 256, 60_000, 64)
Step = tuple[Load, float]


def profiled(buckets: Buckets, truth: Padded | None = None) -> LearnedModel:
    form = truth or Padded(TRUTH, buckets)
    loads = [probe.load for probe in probes(LIMITS, 131_072, buckets)]
    return LearnedModel(priced(loads, form.step_time), buckets, p_moe=TRUTH.p_moe)


@pytest.mark.parametrize("buckets", [NONE, ENGINE], ids=["plain", "padded"])
def test_a_profile_determines_the_true_form(buckets: Buckets) -> None:
    model, form = profiled(buckets), Padded(TRUTH, buckets)
    for load in samples(TRUTH, 5, 200):
        assert model.step_time(load) == pytest.approx(form.step_time(load), rel=1e-6)


@pytest.mark.parametrize("buckets", [NONE, ENGINE], ids=["plain", "padded"])
@pytest.mark.parametrize("drift", [0.6, 1.0, 1.8])
def test_after_200_steps_only_noise_remains(buckets: Buckets, drift: float) -> None:
    """Learn from steps of all kinds that take `drift` times as long as in the profile.

    Programs differ from the form by up to 20%, times are noisy, and one step in 25 takes ten times
    as long.
    """
    random = np.random.default_rng(3)
    speeds = tuple(random.uniform(0.8, 1.2, buckets.programs).tolist())
    served, sigma = Padded(TRUTH, buckets, speeds), 0.05
    times = [(load, drift * served.step_time(load) * random.lognormal(0.0, sigma)) for load in samples(TRUTH, 5, 900)]
    measured = [(load, seconds * (10.0 if random.random() < 0.04 else 1.0)) for load, seconds in times]
    model, judged = profiled(buckets), dict.fromkeys(("decode", "prefill", "mixed"), 0.0)
    found: dict[str, list[float]] = {name: [] for name in judged}
    for count, ((load, seconds), (_, clean)) in enumerate(zip(measured, times, strict=True)):
        if count >= 200:
            found[kind(load)].append(abs(model.step_time(load) / clean - 1))
        model.observe(load, seconds)
    judged = {name: float(np.mean(each)) for name, each in found.items()}
    assert judged["decode"] < 0.10 and judged["prefill"] < 0.15 and judged["mixed"] < 0.15, judged


@pytest.mark.parametrize("slower", [80.0, 1 / 80])
def test_a_profile_of_another_machine_is_corrected_within_a_few_steps(slower: float) -> None:
    """The profile was measured on a busy machine: all kinds of steps are rescaled, also those not seen since."""
    other = replace(TRUTH, **{name: slower * getattr(TRUTH, name) for name in LINEAR})
    model, form = profiled(ENGINE, Padded(other, ENGINE)), Padded(TRUTH, ENGINE)
    load = Load(decode=24, longest=3000, context=40_000)
    for _ in range(15):
        model.observe(load, form.step_time(load))
    for one in (load, Load().add_chunk(500, 4000), Load().add_chunk(8192, 0)):
        assert model.step_time(one) == pytest.approx(form.step_time(one), rel=0.3)


def test_unobserved_kinds_of_steps_keep_their_predictions() -> None:
    """After 2,000 decode steps, predictions for prompts are unchanged."""
    model, form = profiled(ENGINE), Padded(TRUTH, ENGINE)
    random = np.random.default_rng(0)
    for _ in range(2000):
        load = Load(decode=24, longest=3000, context=40_000)
        model.observe(load, form.step_time(load) * random.lognormal(0.0, 0.1))
    for chunk, prefix in ((64, 0), (500, 4000), (8192, 0), (8192, 60_000)):
        load = Load().add_chunk(chunk, prefix)
        assert model.step_time(load) == pytest.approx(form.step_time(load), rel=0.15)


LOADS = st.builds(
    lambda rows, context, chunk, prefix: (
        Load(decode=rows, longest=context, context=rows * context).add_chunk(chunk, prefix)
        if chunk
        else Load(decode=max(rows, 1), longest=context, context=max(rows, 1) * context)
    ),
    st.integers(0, 300),
    st.integers(0, 100_000),
    st.integers(0, 9000),
    st.integers(0, 100_000),
)
TIMES = st.one_of(st.floats(1e-6, 1e3), st.sampled_from([0.0, -1.0, float("nan"), float("inf")]))


@given(st.lists(st.tuples(LOADS, TIMES), max_size=30), LOADS, st.sampled_from([NONE, ENGINE]))
def test_predictions_stay_valid_for_any_measurements(steps: list[Step], load: Load, buckets: Buckets) -> None:
    model = profiled(buckets)
    for one, seconds in steps:
        before = model.step_time(one)
        model.observe(one, seconds)
        assert 0 < model.step_time(one) < float("inf")
        assert model.step_time(one) <= 2 * before * (1 + 1e-9), "a pause changed the model"
    assert 0 <= model.step_time(load) < float("inf")
    assert model.step_time(load.add_chunk(8192, 0)) >= 0 and model.prefill_rate > 0


@pytest.mark.parametrize("kind_", ["learned", "general", "table", "linear", "roofline", "poly"])
def test_a_recipe_survives_a_journal_with_equal_predictions(kind_: str) -> None:
    import json

    form, loads = Padded(TRUTH, ENGINE), [probe.load for probe in probes(LIMITS, 131_072, ENGINE)]
    recipe = Recipe(kind_, tuple(priced(loads, form.step_time)), buckets=ENGINE, p_moe=TRUTH.p_moe, model="m")
    again = Recipe.of(json.loads(json.dumps(recipe.record())))
    assert again == recipe
    one, other = recipe.make(), again.make()
    for load in samples(TRUTH, 2, 50):
        assert one.step_time(load) == other.step_time(load)
        one.observe(load, 0.05)
        other.observe(load, 0.05)


def test_a_recipe_of_another_version_is_a_clear_error() -> None:
    with pytest.raises(InvalidValue, match="is of another version"):
        Recipe.of({"model": "profile", "points": []})


def test_an_empty_profile_is_refused() -> None:
    with pytest.raises(InvalidValue, match="no measured steps to fit"):
        LearnedModel()
