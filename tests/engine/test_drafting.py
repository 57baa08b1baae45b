"""Engines that speculate: nothing is compiled while they serve, drafts that must hold do, draws are the target's."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxserve.config import ServeConfig
from jaxserve.engine.engine import Engine
from jaxserve.errors import InvalidValue
from jaxserve.sched.params import SamplingParams
from jaxserve.sched.plan import Delta
from jaxserve.sched.slo import NO_SLO
from tests.support.engine.statistics import chi_square

REPEATED = (5, 6, 7, 5, 6, 7, 5, 6, 7, 5)


def start(tiny: Path, **speculative: object) -> Engine:
    settings = {"num_speculative_tokens": 2, "adaptive": False, **speculative}
    return Engine.start(
        ServeConfig(
            model=str(tiny),
            mesh="1x1",
            max_num_seqs=2,
            max_num_batched_tokens=16,
            max_model_len=64,
            block_size=4,
            kv_cache_memory=1 << 20,
            max_num_queued_reqs=1000,  # the test that counts draws hands in as many
            speculative_config=json.dumps(settings),
        )
    )


@pytest.fixture(scope="module")
def itself(tiny: Path) -> Iterator[Engine]:
    """The model drafts for itself."""
    engine = start(tiny, method="draft_model", model=str(tiny), rejection_sample_method="probabilistic")
    yield engine
    engine.check()
    engine.close()


def served(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    """Tokens of each, all served together."""
    told: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    ids = [
        engine.submit(prompt, one, slo=NO_SLO, on_delta=told.put) for prompt, one in zip(prompts, params, strict=True)
    ]
    output: dict[int, list[int]] = {id: [] for id in ids}
    left = len(ids)
    while left:
        delta = told.get(timeout=120)
        output[delta.request] += delta.tokens
        if delta.finish_reason is not None:
            assert delta.error is None
            left -= 1
    return [output[id] for id in ids]


@pytest.mark.full
def test_a_model_that_drafts_for_itself_is_always_right(itself: Engine) -> None:
    """So its KV is complete: after prompts, after drafts that all held, and in pages that others computed."""
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


@pytest.mark.full
def test_rows_that_draw_alone_beside_rows_that_draft(itself: Engine) -> None:
    """Penalties, biases, log-probabilities are for single tokens; the others draft in the same steps."""
    alone = [
        SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.4, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=12, logit_bias=((11, 40.0),), ignore_eos=True),
    ]
    plain = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    together = served(itself, [REPEATED] * 4, [*alone, plain])
    assert together == [served(itself, [REPEATED], [one])[0] for one in (*alone, plain)]
    assert set(together[2]) == {11}


@pytest.mark.full
def test_draws_are_the_targets(itself: Engine, tiny: Path) -> None:
    """Tokens 2 and 3 of many requests against their exact chances, all continuations summed, by transformers."""
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


@pytest.mark.full
def test_text_that_repeats_itself_is_looked_up(tiny: Path) -> None:
    engine = start(tiny, method="ngram", prompt_lookup_min=1, prompt_lookup_max=3)
    try:
        params = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)] * 3
        served(engine, [REPEATED, (9, 8, 7), REPEATED], params)
        stats = engine.stats()
        assert 0 < stats.counters.accepted < stats.counters.drafted
        assert stats.compilations_after_warmup == 0
    finally:
        engine.close()


def test_a_draft_must_fit_its_model(tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 97}))
    with pytest.raises(InvalidValue, match=r"97 tokens.*96"):
        start(tiny, method="draft_model", model=str(tmp_path))
