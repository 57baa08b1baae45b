"""Sums of hidden states on real executors, against transformers, and isolation from what is not finite."""

from __future__ import annotations

import random
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.programs.pooling import POOLED, pool
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.runtime.results import NO_VECTOR
from jaxserve.generation.vectors import Vector, pooling_params, vector_of
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import StepPlan
from jaxserve.sched.api.pooling import POOLINGS, Pooled
from tests.support.engine.steps import SLOTS, Job, run

PROMPTS = [tuple(random.Random(i).choices(range(2, 96), k=1 + 7 * i)) for i in range(SLOTS)]


@pytest.fixture(scope="module")
def states(tiny: Path) -> list[Vector]:
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(tiny, dtype=torch.float32)
    with torch.no_grad():
        return [model(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in PROMPTS]


async def served(executor: JaxExecutor, jobs: list[Job], most: int) -> list[Vector]:
    """Return the vector of each job, computed together in chunks of random lengths of up to `most`."""
    found, draw = [Pooled(job.params.pooling or "") for job in jobs], random.Random(most)
    while open_ := [job for job in jobs if not job.sampled]:
        spans = tuple(job.span(draw.randint(1, min(most, 32 // len(open_)))) for job in open_)
        result = await executor.submit(StepPlan(0, spans))
        for index, (job, span) in enumerate(zip(open_, spans, strict=True)):
            job.settle(result, index)
            if index in result.pooled:
                found[jobs.index(job)].add(span.start, span.length, result.pooled[index])
    executor.release([job.slot for job in jobs])
    return [vector_of(one.vector()) for one in found]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("most", [1, 3, 32])
def test_chunks_give_the_vectors_of_transformers(
    executor: JaxExecutor, states: list[Vector], pooling: str, most: int
) -> None:
    params = pooling_params(pooling)
    expected = [one[-1] if pooling == "last" else one.mean(0) for one in states]
    jobs = [Job(prompt, params, slot=slot) for slot, prompt in enumerate(PROMPTS)]
    np.testing.assert_allclose(run(served(executor, jobs, most)), expected, atol=1e-4)
    whole = [run(served(executor, [Job(prompt, params)], 32))[0] for prompt in PROMPTS]
    np.testing.assert_allclose(whole, expected, atol=1e-4)


def test_rows_of_others_reach_no_sum() -> None:
    hidden = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    hidden[5, 3] = np.nan
    begins, lengths = np.zeros((2, POOLED), np.int32)
    begins[:3], lengths[:3] = (0, 4, 6), (5, 2, 10)
    sums = np.asarray(pool(jnp.asarray(hidden), jnp.asarray(begins), jnp.asarray(lengths)))
    np.testing.assert_allclose(sums[0], hidden[:5].sum(0), atol=1e-5)
    np.testing.assert_allclose(sums[2], hidden[6:].sum(0), atol=1e-5)
    assert np.isnan(sums[1]).all() and not sums[3:].any()


def test_a_vector_that_is_not_finite_fails_its_request_alone(
    executor: JaxExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = executor.state.pool

    def broken(hidden: object, parts: object) -> object:
        return original(hidden, parts).at[0, 1].set(jnp.inf)  # type: ignore[arg-type]

    monkeypatch.setattr(executor.state, "pool", broken)
    jobs = [Job(PROMPTS[slot], pooling_params("last"), slot=slot) for slot in range(2)]

    async def failed() -> dict[int, str]:
        result = await executor.submit(StepPlan(0, tuple(job.span() for job in jobs)))
        executor.release([0, 1])
        return dict(result.failed)

    assert run(failed()) == {0: NO_VECTOR}


@pytest.mark.parametrize(
    ("given", "field"),
    [({"pooling": "cls"}, "pooling"), ({"pooling": "last"}, "max_tokens"), ({"pooling": "mean", "n": 2}, "n")],
)
def test_parameters_of_pooling(given: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidValue, match=f"^{field}=") as raised:
        SamplingParams(**given)  # type: ignore[arg-type]
    assert raised.value.param == field
