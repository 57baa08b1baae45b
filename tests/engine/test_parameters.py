"""Sampling parameters through the executor: stopping, biases and log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.sched.api.params import SamplingParams
from tests.support.engine.steps import GREEDY, Job, alone, generate, run

PROMPT = (7, 3, 9, 3, 20, 41, 5)


def test_min_tokens_holds_back_stop_tokens(executor: JaxExecutor) -> None:
    free = alone(executor, Job(PROMPT), 8)
    ends = (free[1], free[4])
    held = alone(executor, Job(PROMPT, SamplingParams(temperature=0, min_tokens=6, max_tokens=None), eos=ends), 12)
    assert not set(held[:6]) & set(ends)
    params = SamplingParams(temperature=0, min_tokens=1, stop_token_ids=(free[0],), max_tokens=None)
    assert alone(executor, Job(PROMPT, params), 1) != free[:1]
    params = SamplingParams(temperature=0, min_tokens=1, max_tokens=None)
    assert alone(executor, Job(PROMPT, params, eos=(free[3],)), 8) == free  # only the first is held back
    params = SamplingParams(temperature=0, min_tokens=2**63, max_tokens=None)  # more than any context, or an int64
    assert not set(alone(executor, Job(PROMPT, params, eos=ends), 12)) & set(ends)


def test_logit_bias_forces_and_forbids(executor: JaxExecutor) -> None:
    free = alone(executor, Job(PROMPT), 6)
    forced = SamplingParams(temperature=0, logit_bias=((33, 100.0),), max_tokens=None)
    assert alone(executor, Job(PROMPT, forced), 6) == [33] * 6
    barred = SamplingParams(temperature=0, logit_bias=tuple((t, -100.0) for t in set(free)), max_tokens=None)
    assert not set(alone(executor, Job(PROMPT, barred), 6)) & set(free)


def test_penalties_see_prompt_and_output(executor: JaxExecutor) -> None:
    params = SamplingParams(temperature=0, repetition_penalty=100.0, max_tokens=None)
    output = alone(executor, Job(PROMPT, params), 20)
    assert len(set(output)) == 20 and not set(output) & set(PROMPT)
    params = SamplingParams(temperature=0, frequency_penalty=2.0, max_tokens=None)
    counts = np.bincount(alone(executor, Job(PROMPT, params), 40), minlength=96)
    free = np.bincount(alone(executor, Job(PROMPT), 40), minlength=96)
    assert counts.max() < free.max()


def test_parameters_of_a_neighboring_row_change_nothing(executor: JaxExecutor) -> None:
    jobs = [Job(PROMPT, slot=0), Job(PROMPT, SamplingParams(top_p=0.5, logprobs=2, max_tokens=None), slot=1)]
    run(generate(executor, jobs, 8))
    assert jobs[0].output == alone(executor, Job(PROMPT), 8)
    assert (len(jobs[0].logprobs), len(jobs[1].logprobs)) == (0, 8)


def test_logprobs_are_those_of_the_model_without_parameters(executor: JaxExecutor) -> None:
    plain = Job(PROMPT, SamplingParams(temperature=0, logprobs=3, max_tokens=None))
    alone(executor, plain, 6)
    assert [entry.token for entry in plain.logprobs] == plain.output
    assert [entry.rank for entry in plain.logprobs] == [1] * 6
    for entry in plain.logprobs:
        assert entry.top[0] == (entry.token, entry.logprob)
        assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)
    biased = Job(PROMPT, SamplingParams(temperature=0, logprobs=1, logit_bias=((33, 100.0),), max_tokens=None))
    alone(executor, biased, 1)
    assert biased.logprobs[0].token == 33 and biased.logprobs[0].logprob < -0.1
    assert biased.logprobs[0].top[0][1] == pytest.approx(plain.logprobs[0].logprob, abs=1e-5)


@pytest.mark.parametrize("chunk", [3, 12, 40])
def test_prompt_logprobs(executor: JaxExecutor, chunk: int) -> None:
    """Log-probabilities of the prompt's second half equal those of decoding that half."""
    start = Job(PROMPT, SamplingParams(temperature=0, logprobs=2, max_tokens=None))
    alone(executor, start, 10)
    whole = (*PROMPT, *start.output)
    job = Job(whole, SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=None))
    run(generate(executor, [job], 1, chunk=lambda: min(chunk, 16)))
    assert [entry.token for entry in job.prompt_logprobs] == list(whole[1:])
    for told, drawn in zip(job.prompt_logprobs[len(PROMPT) - 1 :], start.logprobs, strict=True):
        assert told.rank == drawn.rank
        assert told.logprob == pytest.approx(drawn.logprob, abs=1e-4)
        assert [i for i, _ in told.top] == [i for i, _ in drawn.top]


def test_long_prompts_are_scored_in_blocks(executor: JaxExecutor) -> None:
    prompt = tuple(int(t) for t in np.random.default_rng(0).integers(2, 96, 60))
    job = Job(prompt, SamplingParams(temperature=0, prompt_logprobs=0, max_tokens=None))
    run(generate(executor, [job], 1, chunk=lambda: 32))
    assert [entry.token for entry in job.prompt_logprobs] == list(prompt[1:])
    assert all(entry.top == () and entry.logprob < 0 for entry in job.prompt_logprobs)


def test_seeds_matter(executor: JaxExecutor) -> None:
    params = SamplingParams(max_tokens=None)
    texts = {tuple(alone(executor, Job(PROMPT, params, seed=seed), 8)) for seed in (0, 1, -1, 2**32, 2**63)}
    assert len(texts) == 5
    assert alone(executor, Job(PROMPT, GREEDY, seed=1), 8) == alone(executor, Job(PROMPT, GREEDY, seed=2), 8)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=1e-45, seed=5, max_tokens=None),
        SamplingParams(top_p=1e-300, temperature=2.0, seed=6, max_tokens=None),
        SamplingParams(temperature=1e-45, seed=5, max_tokens=None),
        SamplingParams(temperature=1e-36, seed=5, max_tokens=None),
        SamplingParams(temperature=1e-300, top_p=0.5, seed=5, max_tokens=None),
    ],
)
def test_values_below_those_of_float32_are_the_limit_and_not_off(executor: JaxExecutor, params: SamplingParams) -> None:
    assert alone(executor, Job(PROMPT, params), 12) == alone(executor, Job(PROMPT), 12)
