"""Policies with drafting: draft lengths follow measured acceptance and step times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.perf import Load
from jaxserve.sched.perf.drafted import FIRST, Drafted
from jaxserve.sched.perf.model import GeneralModel
from tests.support.examples import examples
from tests.support.sched.harness import COEFFICIENTS, Job, Outcome, simulate
from tests.support.sched.speculation import JOB, check

CHEAP = replace(COEFFICIENTS, fixed=5e-3, draft=2e-4)
DEAR = replace(COEFFICIENTS, fixed=1e-3, decode=1e-3, draft=2e-3)
JOBS = [Job(range(100 * row, 100 * row + 8), 300) for row in range(4)]


def run(policy: str, **shape: object) -> Outcome:
    return simulate(JOBS, policy=policy, pages=400, draft=4, tokens=64, **shape)


def ended(outcome: Outcome) -> float:
    return max(request.token_times[-1] for request in outcome.requests)


def drafted(outcome: Outcome) -> float:
    """Return the share of decode steps with a draft once acceptance is known."""
    steps = [any(span.draft for span in plan.spans) for _, plan in outcome.plans][20:]
    return sum(steps) / len(steps)


@pytest.mark.parametrize(("coefficients", "acceptance"), [(CHEAP, 0.0), (DEAR, 0.3)])
def test_drafts_that_do_not_pay_are_not_used(coefficients: object, acceptance: float) -> None:
    """Drafts that are always wrong, or cost more than they gain, are only probed from time to time."""
    plain = run("distserve", coefficients=coefficients)
    adaptive = run("distserve/draft", coefficients=coefficients, acceptance=acceptance)
    always = run("distserve/draft:no-adaptive", coefficients=coefficients, acceptance=acceptance)
    assert 0 < drafted(adaptive) < 0.5
    assert ended(adaptive) < 1.03 * ended(plain) < ended(always)


@settings(max_examples=examples(25), deadline=None)
@given(jobs=st.lists(JOB, min_size=1, max_size=6), acceptance=st.floats(0, 1), adaptive=st.booleans())
def test_no_token_is_lost_or_invented(jobs: list[Job], acceptance: float, adaptive: bool) -> None:
    policy = "sarathi:tokens=16/draft" + ("" if adaptive else ":no-adaptive")
    outcome = simulate(jobs, policy=policy, draft=3, acceptance=acceptance, pages=40, tokens=24)
    check(outcome, jobs, 3, 4)


def test_a_request_that_samples_without_drafts_does_not_draft() -> None:
    params = SamplingParams(max_tokens=None, repetition_penalty=1.2)
    late = SamplingParams(max_tokens=None, min_tokens=20)
    jobs = [
        Job(range(8), 40, params=params),
        Job(range(100, 108), 40),
        Job(range(200, 208), 40, params=late),
    ]
    outcome = simulate(jobs, policy="distserve/draft:no-adaptive", pages=400, draft=4, tokens=64, acceptance=0.8)
    lengths = {
        id: [s for _, plan in outcome.plans for s in plan.spans if s.request == id and s.draft] for id in range(3)
    }
    assert not lengths[0] and lengths[1]
    assert lengths[2] and min(span.start for span in lengths[2]) >= 8 + 20 - 1


# ---- measurements
# ------------------------------------------------------------------------------------------------


def test_steps_with_drafts_train_the_model() -> None:
    inner = GeneralModel(COEFFICIENTS, correct=False)
    model = Drafted(inner)
    load = Load(decode=20, longest=10, context=40, drafts=4)
    plain = load._replace(drafts=0)
    assert model.step_time(plain) == inner.step_time(plain)
    assert model.step_time(load) == pytest.approx(FIRST * inner.step_time(plain))
    for _ in range(100):
        model.observe(load, 3.0 * inner.step_time(plain))
    assert model.step_time(load) == pytest.approx(3.0 * inner.step_time(plain), rel=1e-3)
    near, mixed = load._replace(decode=40), load.add_chunk(100, 0)
    assert model.step_time(near) == pytest.approx(3.0 * inner.step_time(near._replace(drafts=0)), rel=1e-3)
    more = model.step_time(mixed) - inner.step_time(mixed._replace(drafts=0))
    assert more == pytest.approx(2.0 * inner.step_time(plain), rel=1e-3)
    version = model.version
    model.observe(plain, 1.0)
    model.observe(load, float("nan"))
    assert model.version == version + 1
