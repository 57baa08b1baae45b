"""Engines with speculative decoding: no compilation while serving, correct drafts accepted, unchanged distribution."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxserve.config import ServeConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.errors import InvalidValue
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Begin, Span, StepPlan, StepResult
from jaxserve.settings.speculative import Speculative
from tests.support.engine.faults import Submitted
from tests.support.engine.statistics import chi_square
from tests.support.engine.steps import GREEDY, Job, alone, executors, finite_pages, generate, run

PROMPT = (40, 41, 42, 43, 44, 45, 46)
REPEATED = (5, 6, 7, 5, 6, 7, 5, 6, 7, 5)


def start(tiny: Path, rows: int = 2, **speculative: object) -> Engine:
    settings = {"num_speculative_tokens": 2, "adaptive": False, **speculative}
    return Engine.start(
        ServeConfig(
            model=str(tiny),
            mesh="1x1",
            max_num_seqs=rows,
            max_num_batched_tokens=16,
            max_model_len=64,
            block_size=4,
            kv_cache_memory=1 << 20,
            max_num_queued_reqs=1000,  # the test that counts samples submits as many
            speculative_config=json.dumps(settings),
        )
    )


@pytest.fixture(scope="module")
def itself(tiny: Path) -> Iterator[Engine]:
    """An engine with the model as its own draft model."""
    engine = start(tiny, method="draft_model", model=str(tiny), rejection_sample_method="probabilistic")
    yield engine
    engine.check()
    engine.close()


def served(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    """Serve all prompts together and return the tokens of each."""
    return [one.whole() for one in [Submitted(engine, *each) for each in zip(params, prompts, strict=True)]]


def test_a_model_as_its_own_draft_is_always_accepted(itself: Engine) -> None:
    """So its KV is complete after prompts, after fully accepted drafts, and in pages computed by other requests."""
    before = itself.stats().counters
    prompts = [REPEATED, (9, 8, 7), tuple(range(20, 50)), tuple(range(20, 45)), REPEATED]
    greedy = [SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)] * len(prompts)
    first, again = served(itself, prompts, greedy), served(itself, prompts, greedy)
    assert first == again and first[0] == first[-1]
    after = itself.stats()
    drafted, right = (getattr(after.counters, name) - getattr(before, name) for name in ("drafted", "accepted"))
    assert drafted == right > 60
    assert after.counters.accepted_at[0] >= after.counters.accepted_at[1] > 0 == after.counters.accepted_at[2]
    assert after.compilations_after_warmup == 0


def test_rows_that_do_not_draft_run_beside_rows_that_do(itself: Engine) -> None:
    """Rows with penalties, biases or log-probabilities do not draft; the others do in the same steps."""
    alone = [
        SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.4, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=12, logit_bias=((11, 40.0),), ignore_eos=True),
    ]
    plain = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    together = served(itself, [REPEATED] * 4, [*alone, plain])
    assert together == [served(itself, [REPEATED], [one])[0] for one in (*alone, plain)]
    assert set(together[2]) == {11}


def test_sampled_tokens_follow_the_target_distribution(itself: Engine, tiny: Path) -> None:
    """Compare tokens 2 and 3 of many requests to exact probabilities by transformers, summed over continuations."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny)
    vocab, prompt, count, heat = 96, (3, 17, 40), 1000, 0.8
    pairs = torch.cartesian_prod(torch.arange(vocab), torch.arange(vocab))
    with torch.no_grad():
        logits = model(torch.cat([torch.tensor([prompt]).repeat(len(pairs), 1), pairs], dim=1)).logits.double()
    one, two, three = (torch.softmax(logits[:, at] / heat, dim=-1) for at in (2, 3, 4))
    chance = one[0][pairs[:, 0]] * two[torch.arange(len(pairs)), pairs[:, 1]]
    second = chance.reshape(vocab, vocab).sum(0).numpy()
    third = (chance[:, None] * three).sum(0).numpy()
    params = [SamplingParams(temperature=heat, max_tokens=4, seed=seed, ignore_eos=True) for seed in range(count)]
    found = np.array(served(itself, [prompt] * count, params))
    for position, wanted in ((1, second), (2, third)):
        assert chi_square(np.bincount(found[:, position], minlength=vocab), wanted) > 1e-4


def test_repeated_text_is_drafted_by_prompt_lookup(tiny: Path) -> None:
    engine = start(tiny, 1, method="ngram", prompt_lookup_min=1, prompt_lookup_max=3)
    try:
        params = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)] * 3
        served(engine, [REPEATED, (9, 8, 7), REPEATED], params)
        stats = engine.stats()
        assert 0 < stats.counters.accepted < stats.counters.drafted
        assert stats.compilations_after_warmup == 0
    finally:
        engine.close()


def test_a_draft_with_nonfinite_logits_fails_its_row_alone_and_leaves_no_trace(tiny: Path) -> None:
    """A drafted token with a NaN embedding must not stay in a page unnoticed.

    The draft would be rejected. The token before it attends to it with a weight of zero, and zero
    times NaN is NaN. A kernel would read the draft for the next request that fills part of the
    page.
    """
    (executor,) = executors(
        tiny, warm=False, speculative=Speculative("ngram", 2, prompt_lookup_min=1, prompt_lookup_max=2)
    )
    state, size, (prompt, draft) = executor.state, 30, text_with_a_wrong_draft(executor)
    begin, beside = Begin(GREEDY, 0, prompt, (), size, ()), tuple(token for token in PROMPT if token != draft)
    expected = alone(executor, Job(beside, slot=1), 2)

    async def scenario() -> None:
        other = Job(beside, slot=1)
        first = Span(0, 0, 0, size, tuple(range(8)), prompt, 0, True, begin)
        await executor.submit(StepPlan(0, (first,)))
        await generate_one(executor, other)
        sound = state.weights
        state.weights = sound | {"embed": sound["embed"].at[draft].set(np.nan)}
        result = await executor.submit(StepPlan(2, (Span(0, 0, size, 3, (8,), (), 2, True), other.span())))
        assert isinstance(result, StepResult)
        assert result.failed == {0: "the model's logits are not finite"}
        assert (*other.output, *result.tokens[1]) == tuple(expected)
        assert not finite_pages(executor, [7]) and finite_pages(executor, range(7))
        executor.release([0, 1])
        state.weights = sound
        heir = Job((5, 9), pages=(7, 8, 9))
        await generate(executor, [heir], 1)
        assert heir.told == 1 and finite_pages(executor, [7])
        await executor.close()

    run(scenario())


async def generate_one(executor: JaxExecutor, job: Job) -> None:
    """Compute the prompt and the first token of a request, which keeps its slot."""
    result = await executor.submit(StepPlan(1, (job.span(),)))
    assert isinstance(result, StepResult)
    job.settle(result, 0)


def text_with_a_wrong_draft(executor: JaxExecutor) -> tuple[tuple[int, ...], int]:
    """Return a prompt for which prompt lookup drafts a wrong token.

    It contains its first output token once, followed by a token that is not the next one.
    """
    for seed in range(100):
        prompt = tuple(np.random.default_rng(seed).permutation(np.arange(2, 96))[:30].tolist())
        first, second = alone(executor, Job(prompt), 2)
        if first in prompt[:-2] and (draft := prompt[prompt.index(first) + 1]) != second:
            return prompt, draft
    raise AssertionError("no such prompt")


def test_a_draft_model_must_match_its_target(tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 97}))
    with pytest.raises(InvalidValue, match=r"97 tokens.*96"):
        start(tiny, method="draft_model", model=str(tmp_path))
