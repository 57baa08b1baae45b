"""Plans on real devices: tokens, KV transfers and failures."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from jaxserve.engine.programs.inputs import SlotTable
from jaxserve.engine.runtime.executor import LEAST_LEAD, MOST_LEAD, JaxExecutor
from jaxserve.engine.startup.compiled import compile_counter
from jaxserve.sched.api.errors import StepFailed
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Begin, StepPlan
from tests.support.engine.steps import (
    GREEDY,
    PAGE,
    ROW_PAGES,
    SLOTS,
    Job,
    alone,
    executors,
    finite_pages,
    generate,
    run,
)
from tests.support.loops import in_loop

PROMPTS = [tuple(int(t) for t in np.random.default_rng(i).integers(2, 96, 5 + 4 * i)) for i in range(6)]
NEW = 16
Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def reference(tiny: Path) -> list[list[int]]:
    """Return transformers' greedy tokens for PROMPTS."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny)
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(whole[0, len(prompt) :].tolist())
    return outputs


def noise(seed: int, position: int, vocab: int) -> Array:
    """Compute the Gumbel noise of one position in numpy, as documented in `sampling.gumbel`."""

    def mix(x: Array) -> Array:
        x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
        return x ^ (x >> 16)

    low, high, at = (np.array([value], np.uint32) for value in (seed & 0xFFFFFFFF, seed >> 32, position))
    first = mix(low ^ mix(at + np.uint32(0x9E3779B9)))
    second = mix(high ^ mix(first + np.uint32(0x7F4A7C15)))
    bits = mix(mix(np.arange(vocab, dtype=np.uint32) + first) ^ second)
    return -np.log(-np.log1p(-np.minimum(bits * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)))


@pytest.mark.parametrize("chunk", [3, 64])
def test_a_seeded_output_uses_the_noise_of_its_positions(executor: JaxExecutor, tiny: Path, chunk: int) -> None:
    """The noise of a token depends on the seed and its position, not on the chunks of its prompt.

    Otherwise an output would not be reproducible by its seed, and an off-by-one in all positions
    would change it.
    """
    import torch
    from transformers import LlamaForCausalLM

    model, prompt, seed = LlamaForCausalLM.from_pretrained(tiny), PROMPTS[2], 0x1234_5678_9ABC
    expected: list[int] = []
    for position in range(len(prompt), len(prompt) + NEW):
        with torch.no_grad():
            scores = model(torch.tensor([[*prompt, *expected]])).logits[0, -1].numpy() / 0.9
        expected.append(int(np.argmax(scores + noise(seed, position, len(scores)))))
    params = SamplingParams(temperature=0.9, max_tokens=None)
    job = Job(prompt, params, slot=4, seed=seed)
    run(generate(executor, [job, Job(PROMPTS[1], params, slot=1)], NEW, chunk=lambda: chunk))
    assert job.output == expected


@pytest.mark.parametrize("ahead", [False, True])
def test_greedy_tokens_match_transformers(executor: JaxExecutor, reference: list[list[int]], ahead: bool) -> None:
    jobs = [Job(prompt, slot=i) for i, prompt in enumerate(PROMPTS)]
    rng = random.Random(0)
    run(generate(executor, jobs, NEW, chunk=lambda: rng.randint(1, 5), ahead=ahead))
    assert [job.output for job in jobs] == reference


def fill(state: Any, value: Callable[[int, int], float]) -> None:
    """Fill the pools by layer and part."""
    state.pools = [
        tuple(part.at[:].set(value(layer, i)) for i, part in enumerate(pool)) for layer, pool in enumerate(state.pools)
    ]


@in_loop
async def test_any_number_of_pages_can_be_transferred(pair: list[JaxExecutor]) -> None:
    """Pages arrive whole and overwrite no others although buffers are padded."""
    source, target = pair
    for pages in (1, 2, 5, 16, 17, 40):
        fill(source.state, lambda layer, i: float(i + 100 * layer))
        fill(target.state, lambda layer, i: -7.0)
        await target.import_kv(source.export_kv(range(3, 3 + pages)), range(10, 10 + pages))
        for layer, pool in enumerate(target.state.pools):
            for i, part in enumerate(pool):
                got = np.asarray(part)
                assert (got[10 : 10 + pages] == i + 100 * layer).all(), (pages, layer, i)
                assert (got[:10] == -7).all() and (got[10 + pages :] == -7).all(), (pages, layer, i)
    assert target.export_kv(()).pieces == ()
    for instance in pair:
        instance.state.rebuild()


def test_a_step_that_raises_fails_all_in_flight_and_the_executor_survives(
    executor: JaxExecutor, reference: list[list[int]]
) -> None:
    async def scenario(broken: Job) -> None:
        steps = [executor.submit(StepPlan(i, (broken.span(),))) for i in (3, 4)]
        for step in steps:
            with pytest.raises(StepFailed, match=r"step \d of instance mixed-0: .*out of memory"):
                await step

    def fault(plan: StepPlan) -> None:
        raise MemoryError("out of memory on purpose")

    before = executor.rebuilds
    executor.fault = fault
    run(scenario(Job(PROMPTS[0], slot=1)))
    executor.fault = None
    executor.rebuild()
    assert executor.rebuilds == before + 1
    assert alone(executor, Job(PROMPTS[1], slot=1), NEW) == reference[1]


def test_an_error_before_dispatch_fails_the_step(executor: JaxExecutor, reference: list[list[int]]) -> None:
    async def scenario() -> None:
        job = Job(tuple(range(2, 60)), slot=1)  # more tokens than any program takes
        with pytest.raises(StepFailed, match="58 tokens is larger than 8 rows and 32 tokens"):
            await executor.submit(StepPlan(0, (job.span(),)))

    run(scenario())
    executor.rebuild()
    assert alone(executor, Job(PROMPTS[1], slot=1), NEW) == reference[1]


@in_loop
async def test_a_cancelled_import_writes_nothing_afterwards(
    pair: list[JaxExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages may belong to another request by the time at which its KV is on the instance."""
    source, target = pair
    receive, reached, free, received = target.state.receive, *(threading.Event() for _ in range(3))

    def gated(piece: Any) -> Any:
        reached.set()
        assert free.wait(60)
        found = receive(piece)
        received.set()
        return found

    pages = list(range(4))
    fill(source.state, lambda layer, i: 1.0)
    fill(target.state, lambda layer, i: -7.0)
    monkeypatch.setattr(target.state, "receive", gated)
    begun = asyncio.ensure_future(target.import_kv(source.export_kv(range(20, 24)), pages))
    assert await asyncio.to_thread(reached.wait, 60)
    begun.cancel()
    await asyncio.wait([begun])
    free.set()
    assert await asyncio.to_thread(received.wait, 60)
    await asyncio.sleep(0.05)
    assert begun.cancelled() and all((np.asarray(part) == -7).all() for pool in target.state.pools for part in pool)


@in_loop
async def test_no_page_is_written_into_a_rebuilt_pool(pair: list[JaxExecutor]) -> None:
    """Pages were reserved in the lost pool: written into the new one, they would overwrite those of other requests."""
    source, target = pair
    pages = list(range(4))
    kv_buffer = source.export_kv(pages)
    begun = asyncio.ensure_future(target.import_kv(kv_buffer, pages))
    await asyncio.sleep(0)
    target._fail(target._life, RuntimeError("on purpose"))
    with pytest.raises(StepFailed, match="accepts no work until the pool is rebuilt"):
        await target.import_kv(kv_buffer, pages)
    with pytest.raises(StepFailed, match="accepts no work until the pool is rebuilt"):
        target.export_kv(pages)
    with pytest.raises(StepFailed, match="accepts no work until the pool is rebuilt"):
        target.submit(StepPlan(0, (Job(PROMPTS[0]).span(),)))
    target.rebuild()
    with pytest.raises(StepFailed, match="lost its KV pool while 4 pages were being transferred"):
        await begun
    await target.import_kv(kv_buffer, pages)


def test_a_row_with_nonfinite_logits_fails_alone(tiny: Path, reference: list[list[int]]) -> None:
    executor = executors(tiny, warm=False)[0]
    poison = 95
    state = executor.state
    state.weights = state.weights | {"embed": state.weights["embed"].at[poison].set(np.nan)}
    prompts = [tuple(t if t != poison else 2 for t in prompt) for prompt in PROMPTS[:3]]
    expected = [alone(executor, Job(prompt, slot=i), 4) for i, prompt in enumerate(prompts)]
    jobs = [Job(prompt, slot=i) for i, prompt in enumerate(prompts)]
    jobs.append(Job((5, poison, 9, 9, 9, 9), slot=3))
    run(generate(executor, jobs, 4, ahead=False))
    assert [job.output for job in jobs[:3]] == expected
    assert [job.failed for job in jobs] == [None] * 3 + ["the model's logits are not finite"]
    heir = Job(prompts[0], slot=3)  # the same pages: their NaN must not matter
    assert heir.pages == jobs[3].pages
    assert not finite_pages(executor, jobs[3].pages[:2])
    assert alone(executor, heir, 2) == expected[0][:2]
    # The heir writes six of the eight positions of its pages. XLA ignores the rest, but kernels multiply it
    # by zero, and zero times NaN is NaN: the pool itself has to be clean.
    assert heir.computed == 6 and heir.told == 2
    assert finite_pages(executor, heir.pages[: heir.told])
    # The masks of the step ahead would wait for a token that a failed row never gets.
    limited = SamplingParams(temperature=0.0, max_tokens=None, allowed_token_ids=tuple(range(2, 96)))
    sound, failed = Job(prompts[0], limited), Job((5, poison, 9, 9, 9, 9), limited, slot=1)
    run(asyncio.wait_for(generate(executor, [sound, failed], 4), 30))
    assert (sound.output, sound.failed) == (expected[0], None)
    assert (failed.output, failed.failed) == ([], "the model's logits are not finite")


@in_loop
async def test_unvalidated_pages_are_zeroed_before_reuse(executor: JaxExecutor) -> None:
    """A chunk without a sampled token may leave NaN unnoticed. The test plants it after the chunk."""
    job, heir, sure = Job(PROMPTS[3], slot=3), Job(PROMPTS[0], slot=3), Job(PROMPTS[3], slot=3)
    await executor.submit(StepPlan(0, (job.span(9),)))
    state, pages = executor.state, np.array(job.pages[: job.told])
    state.pools = [tuple(part.at[pages].set(np.nan) for part in pool) for pool in state.pools]
    executor.release([3])
    await generate(executor, [heir], 4)
    for pool in executor.state.pools:
        for part in pool:
            assert np.isfinite(np.asarray(part)[list(heir.pages[: heir.told])]).all()
    await generate(executor, [sure], 2, chunk=lambda: 5)
    assert not executor._doubts.pages.intersection(sure.pages[: sure.told]), (
        "pages before a finite token are still unvalidated"
    )
    executor.rebuild()


def test_unused_block_table_entries_name_pages_of_the_row(executor: JaxExecutor) -> None:
    """Kernels read whole tiles of pages: page 0, and those of the slot's last request, may belong to other requests."""
    slots = SlotTable(executor.state.programs.limits)
    begun = Job(PROMPTS[0]).span().begin
    assert begun is not None
    for pages in ([7, 8, 9, 10], [3]):
        slots.begin(2, begun)
        slots.extend(2, pages)
        slots.release(2) if len(pages) > 1 else None
    assert set(slots.tables[2].tolist()) == {3}
    slots.extend(2, [5])
    assert slots.tables[2].tolist() == [3] + [5] * (ROW_PAGES - 1)


def test_a_released_slot_keeps_no_state_of_its_request(executor: JaxExecutor) -> None:
    limits = executor.state.programs.limits
    slots, fresh = SlotTable(limits), SlotTable(limits)
    everything = SamplingParams(
        temperature=0.5, top_p=0.7, top_k=9, logprobs=3, prompt_logprobs=2, presence_penalty=0.5, min_tokens=3,
        logit_bias=((4, 1.5),), max_tokens=None,
    )  # fmt: skip
    slots.begin(2, Begin(everything, 7, PROMPTS[0], (), len(PROMPTS[0]), (1,)))
    slots.extend(2, [3, 4])
    assert all((slots.bans, slots.biases, slots.begins, slots.scored)) and slots.held(2) == [3, 4]
    slots.release(2)
    for name, value in vars(fresh).items():
        if name != "tables":  # its used columns are counted in `pages`
            np.testing.assert_equal(getattr(slots, name), value, name)


def test_nothing_compiles_after_warm_up(pair: list[JaxExecutor]) -> None:
    """Run random plans of chunks, decodes, all kinds of parameters, transfers and a failure."""
    rng, counter = random.Random(3), compile_counter()
    kinds = [
        GREEDY,
        SamplingParams(max_tokens=None),
        SamplingParams(top_p=0.7, top_k=9, min_p=0.01, logprobs=3, prompt_logprobs=2, max_tokens=None),
        SamplingParams(repetition_penalty=1.1, logit_bias=((4, 1.5),), min_tokens=3, max_tokens=None),
    ]
    before = counter.compilations_total + counter.cache_loads_total
    for trial in range(4):
        jobs = [
            Job(tuple(rng.choices(range(2, 96), k=rng.randint(1, 30))), rng.choice(kinds), slot=i, seed=i, eos=(1,))
            for i in rng.sample(range(SLOTS), rng.randint(1, SLOTS))
        ]
        instance = pair[trial % 2]
        run(generate(instance, jobs, rng.randint(1, 8), chunk=lambda: rng.choice([1, 2, 4])))
        pages = range(rng.randint(1, ROW_PAGES))
        run(pair[1].import_kv(pair[0].export_kv(pages), pages))
    pair[0]._fail(pair[0]._life, RuntimeError("on purpose"))
    pair[0].rebuild()
    alone(pair[0], Job(PROMPTS[0]), 4)
    assert counter.compilations_total + counter.cache_loads_total == before


@in_loop
async def test_times_are_monotone_and_steps_do_not_overlap(executor: JaxExecutor) -> None:
    job, results, last = Job(PROMPTS[0]), [], executor.now()
    steps = [executor.submit(StepPlan(i, (job.span(),))) for i in range(6)]
    for step in steps:
        results.append(await step)
    for result in results:
        assert last <= result.started < result.finished <= executor.now()
        last = result.finished
    assert LEAST_LEAD <= executor.lead <= MOST_LEAD
    assert (executor.page_size, executor.pages >= ROW_PAGES) == (PAGE, True)


@in_loop
async def test_close_ends_the_thread(tiny: Path) -> None:
    instance = executors(tiny, warm=False)[0]
    step = instance.submit(StepPlan(0, (Job(PROMPTS[0]).span(),)))
    await instance.close()
    assert step.done()
    assert len((await step).tokens[0]) == 1
    await asyncio.sleep(0)
    assert not instance._waiter.is_alive()
