"""Policies with drafting: draft lengths follow measured acceptance and step times."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import load_yaml, preset
from jaxserve.sched import sim
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.perf import Load
from jaxserve.sched.perf.drafted import FIRST, Drafted
from jaxserve.sched.perf.model import GeneralModel
from jaxserve.sched.policies.drafting import Paced, _Batch
from jaxserve.sched.sim import Latency, Options
from jaxserve.sched.sim.workload import Lengths, Workload
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


@given(
    rows=st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(-1.0, 3.0), st.floats(0.0, 4.0)), min_size=1, max_size=8),
    start=st.floats(0.0, 5.0),
)
def test_a_step_of_several_tokens_may_take_as_long_as_its_row_is_ahead(
    rows: list[tuple[float, float, float]], start: float
) -> None:
    tpot, ahead, gains = (np.array(column) for column in zip(*rows, strict=True))
    queue = SimpleNamespace(tpot=tpot, deadline=start + ahead)
    paced = Paced(cast(Any, queue), start, gains).tpot
    assert (paced >= tpot).all() and (paced <= np.maximum(tpot, ahead + 1e-9)).all()
    np.testing.assert_array_less(paced, (1.0 + gains) * tpot + 1e-9)


def test_drafts_follow_the_objectives() -> None:
    """Steps of one token per row take 11 ms of 15: without drafts there is hardly time for prompts beside them."""
    latency = load_yaml(preset("latency", "llama3-8b-a800"), Latency)
    prompts, answers = Lengths("fixed", value=600), Lengths("fixed", value=150)
    workload = Workload("tight", prompts, answers, ttft=1.0, tpot=0.015)

    def attained(policy: str) -> float:
        options = Options(draft=4, acceptance=0.7, noise=0.0)
        return sim.simulate(
            workload, policy, "1x1", latency, qps=6.0, num_requests=80, options=options
        ).summary.attained

    plain, drafts = attained("unified"), attained("unified/draft")
    assert plain < 0.9 < drafts


def test_a_draft_beside_prompts_keeps_the_gaps() -> None:
    """A step with a chunk may be longer with drafts, but not beyond the TBT of a row."""
    batch = _Batch(
        GeneralModel(CHEAP), 512, 100, 400, np.ones(4, bool), np.full(4, 0.9), Load().add_chunk(64, 0), limit=inf
    )
    found = batch.best(4, 4 / batch.alone)
    assert found is not None and found.draft == 4
    assert replace(batch, limit=batch.seconds(4, 4) - 1e-9).best(4, 4 / batch.alone) is None
    assert replace(batch, tokens=64 + 4 + 15).best(4, 4 / batch.alone) is None, "16 drafted tokens have no room"


def test_steps_with_prompt_chunks_draft() -> None:
    jobs = [*JOBS, Job(range(1000, 1200), 4, 0.3)]
    outcome = simulate(
        jobs, policy="sarathi:tokens=32/draft", pages=400, draft=4, tokens=64, coefficients=CHEAP, acceptance=0.9
    )
    kinds = [{span.draft > 0 for span in plan.spans if span.length > 1} for _, plan in outcome.plans]
    assert {True, False} in kinds, "a step with a draft and a chunk"
