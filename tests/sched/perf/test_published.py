"""Step-time models of other papers by name, and what online correction can and cannot do."""

from collections.abc import Callable

import numpy as np
import pytest

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.perf import Load, PerfModel
from jaxserve.sched.perf import KINDS, make
from jaxserve.sched.perf.compare import compare
from jaxserve.sched.perf.fit import kind
from jaxserve.sched.perf.linear import LinearModel
from jaxserve.sched.perf.model import Coefficients, Corrected
from jaxserve.sched.perf.online import BOUND
from jaxserve.sched.perf.poly import Polynomial
from jaxserve.sched.perf.registry import samples
from jaxserve.sched.perf.roofline import Roofline, Term

TRUTH = Coefficients(8.7e-3, 4.5e-5, 2e-5, 3e-10, 2.4e-7, 1.5e-8, 11.5e-3, 8 / 256)
LINE = Coefficients(8e-3, 4e-5, 4e-5, 0.0, 2e-8, 2e-8)
ROOF = Roofline((Term(1e-4, 0.0, 1e-3), Term(1e-6, 2e-3, 2e-2)), 5e-8)
LEARNING = [name for name in KINDS if name not in ("exact", "table")]  # table is a mean over all steps ever seen


def decode(*contexts: int) -> Load:
    load = Load()
    for context in contexts:
        load = load.add_decode(context)
    return load


def profile(truth: Callable[[Load], float], seed: int = 3) -> list[tuple[Load, float]]:
    return [(load, truth(load)) for load in samples(TRUTH, seed, 300)]


def drafted(count: int, seed: int = 0) -> list[Load]:
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        drafts, rows = int(random.integers(0, 6)), int(random.integers(1, 60))
        contexts = random.integers(10, 9000, rows).tolist()
        load = Load(decode=rows * (1 + drafts), longest=max(contexts), context=sum(contexts), drafts=drafts)
        made.append(load.add_chunk(int(random.integers(1, 600)), 0) if random.random() < 0.5 else load)
    return made


def error(model: PerfModel, steps: list[tuple[Load, float]]) -> float:
    return float(np.mean([abs(model.step_time(load) / seconds - 1) for load, seconds in steps]))


@pytest.mark.parametrize("name", KINDS)
def test_every_model_is_made_from_a_truth_and_from_points(name: str) -> None:
    for model in (make(name, LINE), make(name, points=profile(LINE.step_time))):
        assert 0.5 < model.step_time(Load().add_chunk(4096, 0)) / LINE.step_time(Load().add_chunk(4096, 0)) < 2
        assert model.decode_times(np.ones(3), np.full(3, 500.0), np.full(3, 500.0)).shape == (3,)
        assert model.prefill_times(np.array([0.0, 9000.0]), np.zeros(2), 4096)[0] == 0
        assert 1e3 < model.prefill_rate < 1e5


def test_names_and_sources_are_checked() -> None:
    with pytest.raises(InvalidValue, match="perf='tables' must be one of learned, general, exact, table, table:ewma"):
        make("tables", TRUTH)
    for sources in ({}, {"truth": TRUTH, "points": []}):
        with pytest.raises(InvalidValue, match="either true coefficients or measured points"):
            make("general", **sources)
    for name in KINDS:
        with pytest.raises(InvalidValue):
            make(name, points=[])


def test_roofline_is_fitted_to_its_own_steps() -> None:
    steps = [(load, ROOF.step_time(load)) for load in drafted(400)]
    found = Roofline.fitted(steps)
    assert error(Corrected(found), steps) < 1e-6
    assert found.context == pytest.approx(ROOF.context, rel=1e-3)
    assert sorted(term.token for term in found.terms) == pytest.approx([1e-6, 1e-4], rel=1e-2)
    one = Roofline.fitted(steps, terms=1)
    assert error(Corrected(one), steps) > 0.02
    published = Roofline.fitted(steps, context=False)
    assert published.context == 0 and error(Corrected(published), steps) > 0.01


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: Roofline(()), "one or more"),
        (lambda: Roofline((Term(-1.0, 0.0, 0.0),)), "token=-1.0 must be 0 or more"),
        (lambda: Roofline((Term(0.0, 0.0, 1.0),), float("nan")), "context=nan must be 0 or more"),
        (lambda: Roofline.fitted([]), "no measured steps"),
        (lambda: Roofline.fitted([(Load(1), 1.0)], terms=0), "terms=0 must be at least 1"),
        (lambda: Polynomial(1.0, -1.0, 0.0), "linear=-1.0 must be 0 or more"),
        (lambda: Polynomial.fitted([(decode(10), 1.0)]), "prompt tokens alone"),
    ],
)
def test_invalid_forms_are_refused(make_it: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        make_it()


def test_a_polynomial_predicts_the_rest_of_a_prompt() -> None:
    form = Polynomial(0.01, 1e-4, 1e-9)

    def whole(tokens: float) -> float:
        return 0.01 + 1e-4 * tokens + 1e-9 * tokens**2

    assert form.step_time(Load().add_chunk(8000, 0)) == pytest.approx(whole(8000))
    left = form.prefill_times(np.array([6000.0]), np.array([2000.0]), 1 << 20)
    assert float(left[0]) == pytest.approx(0.01 + whole(8000) - whole(2000))


def test_a_polynomial_is_fitted_to_prompts_and_rows() -> None:
    form = Polynomial(0.01, 1e-4, 1e-9, 5e-3, 2e-5, 3e-8)
    found = Polynomial.fitted(profile(form.step_time))
    for name in Polynomial.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(form, name), rel=1e-3)


@pytest.mark.parametrize("name", ["general", "linear", "roofline", "poly"])
def test_a_fit_to_very_noisy_times_predicts_the_median(name: str) -> None:
    """Least squares of the relative error would predict exp(-1.5 sigma^2) of the median, a fifth."""
    random = np.random.default_rng(4)
    line = LinearModel(8e-3, 4e-5, 0.0)  # contained in every form
    steps = [(load, line.step_time(load) * random.lognormal(0, 1.0)) for load in samples(TRUTH, 1, 2000)]
    model = make(name, points=steps)
    ratios = [model.step_time(load) / line.step_time(load) for load, _ in steps]
    assert 0.85 < np.median(ratios) < 1.15 and max(ratios) < 2 and min(ratios) > 0.5


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("drift", [0.8, 1.2])
def test_a_drift_by_a_fifth_is_learned(name: str, drift: float) -> None:
    """The load is predicted equally well before the drift and after 500 slower or faster steps."""
    load = decode(*[4096] * 16)  # an entry of the table
    model = make(name, TRUTH)
    for _ in range(300):
        model.observe(load, TRUTH.step_time(load))
    assert model.step_time(load) == pytest.approx(TRUTH.step_time(load), rel=0.01)
    for _ in range(500):
        model.observe(load, drift * TRUTH.step_time(load))
    assert model.step_time(load) == pytest.approx(drift * TRUTH.step_time(load), rel=0.01)


def serving(count: int, seed: int) -> list[Load]:
    """Return steps as in serving: batches change slowly, with a chunk now and then."""
    random = np.random.default_rng(seed)
    contexts, made = random.integers(500, 8000, 20).tolist(), []
    for _ in range(count):
        contexts = [context + 1 for context in contexts]
        if random.random() < 0.05:
            contexts.append(int(np.exp(random.normal(7.8, 1.0))))
        if len(contexts) > 1 and random.random() < 0.05:
            contexts.pop(int(random.integers(len(contexts))))
        load = decode(*contexts)
        chunk = random.random() < 0.1
        made.append(load.add_chunk(int(random.integers(64, 4096)), int(random.integers(0, 8000))) if chunk else load)
    return made


@pytest.mark.parametrize("forgetting", [1.0, 0.99, 0.95])
def test_a_line_recalibrates_over_thousands_of_noisy_steps(forgetting: float) -> None:
    """Steps that hardly vary leave a direction undetermined: plain recursive least squares diverges there."""
    random = np.random.default_rng(2)
    model = LinearModel.fitted(profile(TRUTH.step_time), forgetting=forgetting)
    errors = []
    for load in serving(3000, 1):
        seconds = TRUTH.step_time(load)
        errors.append(model.step_time(load) / seconds - 1)
        model.observe(load, seconds * random.lognormal(0, 0.1))
    assert np.mean(np.abs(errors)) < 0.07 and np.max(np.abs(errors)) < 0.35
    assert abs(np.mean(errors)) < 0.05 and min(model.coefficients) >= 0


@pytest.mark.parametrize("name", ["general", "roofline", "poly"])
def test_a_pause_hardly_moves_a_model_and_corrections_are_bounded(name: str) -> None:
    model, load = make(name, TRUTH), decode(5000)
    before = model.step_time(load)
    model.observe(load, 1000 * before)
    assert before < model.step_time(load) <= 1.0501 * before
    for _ in range(1000):
        model.observe(load, 1000 * before)
    assert model.step_time(load) == pytest.approx(BOUND * before)
    for _ in range(2000):
        model.observe(load, before / 1000)
    assert model.step_time(load) == pytest.approx(before / BOUND)


def test_comparison_separates_fitted_from_online_errors() -> None:
    """If the machine slows down by a fifth halfway, a model that learns is closer than one that was fitted."""
    steps = profile(TRUTH.step_time)
    drifting = [(load, seconds * (1.0 if i < 150 else 1.4)) for i, (load, seconds) in enumerate(steps)]
    scores = {score.name: score for score in compare(drifting, p_moe=TRUTH.p_moe)}
    assert list(scores) == list(KINDS)
    general, exact = scores["general"], scores["exact"]
    assert exact.mape == exact.online == general.mape and general.mape is not None and general.mape > 0.1
    assert general.online is not None and general.online < 0.6 * general.mape
    assert general.median is not None and general.worst is not None and general.median < general.mape < general.worst
    assert general.by_kind is not None and set(general.by_kind) == {"prefill", "decode", "mixed"}


def test_a_model_that_the_steps_cannot_determine_says_so() -> None:
    steps = [(load, seconds) for load, seconds in profile(TRUTH.step_time) if kind(load) == "decode"]
    scores = {score.name: score for score in compare(steps[:8])}
    assert scores["poly"].mape is None and "prompt tokens alone" in scores["poly"].problem
    assert "prompt tokens alone" in scores["table"].problem
    assert scores["linear"].mape is not None and not scores["linear"].problem
    with pytest.raises(InvalidValue, match="perf='lut' must be one of"):
        compare(steps, ["lut"])
    with pytest.raises(InvalidValue, match="no measured steps"):
        compare([])
