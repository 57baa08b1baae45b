"""Prefill steps in segments: stopped at any boundary and resumed in any order, they match whole steps bitwise."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.programs.inputs import Limits
from jaxserve.engine.programs.mesh import plan_mesh
from jaxserve.engine.programs.segments import Segments, links, outside
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.runtime.segment_pace import SegmentPace
from jaxserve.engine.startup.build import ExecutorConfig, build_executors, random_init
from jaxserve.engine.startup.compiled import compile_counter
from jaxserve.models import registry
from jaxserve.models.layers import Part
from jaxserve.models.spec import ModelSpec
from jaxserve.sched.api.errors import InvalidValue, StepFailed
from jaxserve.sched.api.executor import Step
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Begin, Span, StepPlan, StepResult, Suspended
from jaxserve.sched.api.preemption import Boundary
from tests.support.engine.mixed import Mixed, jobs_of
from tests.support.engine.steps import GREEDY, Job, alone, executors, generate, run
from tests.support.examples import cases, examples
from tests.support.loops import in_loop
from tests.support.parity.families import FAMILIES, SIZES

SAMPLED = SamplingParams(temperature=1.0, logprobs=3, max_tokens=None)
PENALISED = SamplingParams(temperature=0.9, repetition_penalty=1.3, max_tokens=None)
CASES = [(name, mesh, cut) for name in FAMILIES for mesh in ("1x1", "1x2") for cut in ("op", "layer", "layers:2")]
BARE = [("Llama", "1x1", "op"), ("Gemma3", "1x2", "layers:2"), ("DeepseekV2", "1x1", "layer")]


def spec_of(name: str, layers: int) -> ModelSpec:
    own = dict(FAMILIES[name])
    if "layer_types" in own:
        own["layer_types"] = (own["layer_types"] * layers)[:layers]
    config = {**SIZES, **own, "num_hidden_layers": layers, "architectures": [f"{name}ForCausalLM"]}
    return registry.spec_from_config(config)


async def stepwise(executor: JaxExecutor, spans: Sequence[Span], depths: Sequence[int]) -> tuple[StepResult, int]:
    """Run a step `depths` segments at a time and then to its end; also return how often it was stopped."""
    number, resume = 1, None
    for depth in depths:
        executor.pace = SegmentPace(depth)
        step = executor.submit(StepPlan(number, tuple(spans), preemptible=True, resume=resume))
        executor.preempt(step)
        result = await step
        if isinstance(result, StepResult):
            return result, number - 1
        assert result == Suspended(number, result.started, result.at)
        assert result.started <= result.at <= executor.now()
        number, resume = number + 1, number
    result = await executor.submit(StepPlan(number, tuple(spans), preemptible=True, resume=resume))
    assert isinstance(result, StepResult)
    return result, number - 1


def pools(executor: JaxExecutor, pages: int) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(part)[:pages] for pool in executor.state.pools for part in pool]


@pytest.mark.parametrize("case", cases(BARE, CASES), ids=str)
def test_a_segmented_step_equals_a_whole_one_bitwise(case: tuple[str, str, str]) -> None:
    name, mesh, boundary = case
    spec, plan = spec_of(name, 6 if boundary == "op" else 3), plan_mesh(mesh)
    config = ExecutorConfig(
        spec=spec, load=random_init(3), mesh=plan, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256,
        page_size=16, kv_cache_memory=1 << 20, preempt_boundary=boundary, warm=False,
    )  # fmt: skip
    (executor,) = build_executors(config)
    segments = len(links(spec, Boundary.parse(boundary)))
    prompt = tuple(np.random.default_rng(0).integers(8, 250, 60).tolist())
    first = Span(1, 0, 0, 40, (0, 1, 2), prompt[:40], 0, False, Begin(SAMPLED, 5, (), (), 60, ()))
    second = Span(1, 0, 40, 20, (3,), prompt[40:], 0, True)
    seen: list[Any] = []
    for depths in (None, (), (1,) * segments, (3, 1, 2)):
        results, stopped = [], 0
        for span in (first, second):
            if depths is None:
                result = run_plan(executor, StepPlan(1, (span,)))
            else:
                result, stops = run(stepwise(executor, (span,), depths))
                stopped += stops
            results.append((result.tokens, result.logprobs))
        seen.append((results, pools(executor, 4)))
        executor.release([0])
        if depths == (1,) * segments:
            assert stopped == 2 * (segments - 1)
    (expected, kv), *others = seen
    for got, held in others:
        assert got == expected
        for mine, theirs in zip(held, kv, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    run(executor.close())


def run_plan(executor: JaxExecutor, plan: StepPlan) -> StepResult:
    async def scenario() -> Any:
        return await executor.submit(plan)

    result = run(scenario())
    assert isinstance(result, StepResult)
    return result


def test_equal_layers_share_a_program() -> None:
    spec = spec_of("Gemma3", 6)  # windows in every other layer
    assert spec.kinds == (0, 1) * 3
    kinds = {boundary: [link.kind for link in links(spec, Boundary.parse(boundary))] for boundary in ("op", "layer")}
    assert kinds["layer"] == [((0,), Part.WHOLE), ((1,), Part.WHOLE)] * 3
    assert kinds["op"] == [((k,), part) for k in (0, 1) * 3 for part in (Part.MIX, Part.FEED)]
    fours = links(spec, Boundary.parse("layers:4"))
    assert [(link.layers.start, link.layers.stop, link.kind[0]) for link in fours] == [
        (0, 4, (0, 1) * 2),
        (4, 6, (0, 1)),
    ]


def test_short_steps_run_as_a_whole_but_the_largest_never() -> None:
    spec, mesh = spec_of("Qwen2", 3), jax.make_mesh((1,), ("tp",))

    def sizes(tokens: int) -> list[int]:
        limits = Limits(slots=4, tokens=tokens, pages=8, page_size=16, row_pages=4, vocab=spec.vocab)
        return [bucket.tokens for bucket in Segments(spec, mesh, limits, Boundary(1)).buckets]

    assert sizes(8192) == [192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192]
    assert sizes(512) == [192, 256, 384, 512]
    assert sizes(100) == [100]


# Several steps at once on one executor


@pytest.fixture(scope="module")
def cut(tiny: Path) -> JaxExecutor:
    """An executor with two layers and four segments."""
    (made,) = executors(tiny, preempt_boundary="op")
    made.pace = SegmentPace(1)
    return made


PROMPTS = [tuple(int(t) for t in np.random.default_rng(i).integers(2, 96, 9 + 7 * i)) for i in range(4)]
PARAMS = [GREEDY, SAMPLED, PENALISED, GREEDY]
NEW = 4


@pytest.fixture(scope="module")
def expected(executor: JaxExecutor) -> list[list[int]]:
    """Return the tokens of each request alone, in whole steps on another executor."""
    return [alone(executor, Job(PROMPTS[i], PARAMS[i], seed=7 * i), NEW) for i in range(4)]


DEPTH = st.sampled_from([1, 1, 2, 3, None])
ACTION = st.tuples(
    st.integers(0, 3), st.integers(2, 30), DEPTH, st.sampled_from(["start", "start", "resume", "decode"])
)


@given(actions=st.lists(ACTION, max_size=24))
@settings(max_examples=examples(40))
def test_randomly_stopped_steps_keep_their_tokens(
    cut: JaxExecutor, expected: list[list[int]], actions: list[tuple[int, int, int | None, str]]
) -> None:
    mixed = Mixed(cut, jobs_of(PROMPTS, PARAMS), NEW)
    run(mixed.play(actions))
    assert [job.output for job in mixed.jobs] == expected
    assert not cut._suspended and not cut._flying and not cut._queue


def test_nothing_is_compiled_after_warm_up(cut: JaxExecutor) -> None:
    before = compile_counter().compilations_total, compile_counter().cache_loads_total
    job = Job(PROMPTS[3], SAMPLED)
    _, stops = run(stepwise(cut, (job.span(20),), (1, 1, 1)))
    run(generate(cut, [job], 3))
    assert stops == 3
    assert (compile_counter().compilations_total, compile_counter().cache_loads_total) == before


def test_no_more_segments_are_dispatched_than_allowed(cut: JaxExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    most: list[int] = []
    segment = cut.state.segment

    def counted(walk: Any) -> jax.Array:
        mark = segment(walk)
        most.append(1 + len(next(iter(cut._flying.values())).flying))
        return mark

    monkeypatch.setattr(cut.state, "segment", counted)
    for depth in (1, 2, 3, 9):
        cut.pace, job = SegmentPace(depth), Job(PROMPTS[2])
        most.clear()
        run(stepwise(cut, (job.span(20),), ()) if depth == 2 else _whole(cut, job))
        assert len(most) == 4
        assert max(most) <= depth if depth < 4 else most == [1, 2, 3, 4]
        cut.release([0])


async def _whole(executor: JaxExecutor, job: Job) -> None:
    assert isinstance(await executor.submit(StepPlan(0, (job.span(20),), preemptible=True)), StepResult)


@in_loop
async def test_a_fully_dispatched_step_cannot_be_stopped_and_another_may_follow(cut: JaxExecutor) -> None:
    """Stopping a fully dispatched step has no effect, and the next submitted step runs behind it."""
    cut.pace = SegmentPace(4)
    first, second = Job(PROMPTS[3], slot=0), Job(PROMPTS[2], slot=1)
    step = cut.submit(StepPlan(1, (first.span(20),), preemptible=True))
    assert cut.committed(step).done() and not step.done()
    cut.preempt(step)
    behind = cut.submit(StepPlan(2, (second.span(20),), preemptible=True))
    results = await asyncio.gather(step, behind)
    assert [type(result) for result in results] == [StepResult, StepResult]
    assert results[0].finished <= results[1].finished
    assert cut.committed(step).done()
    cut.release([0, 1])


@in_loop
async def test_a_step_waits_for_one_that_is_not_fully_dispatched(cut: JaxExecutor) -> None:
    cut.pace = SegmentPace(1)
    first, second = Job(PROMPTS[3], slot=0), Job(PROMPTS[2], slot=1)
    step = cut.submit(StepPlan(1, (first.span(20),), preemptible=True))
    whole = cut.submit(StepPlan(2, (second.span(20),)))
    span = first.span(20)
    last = cut.submit(StepPlan(3, (span,), preemptible=True))
    cut.preempt(last)  # before any of it was dispatched: it stops with nothing computed
    assert not cut.committed(step).done()
    with pytest.raises(InvalidValue, match="step 2 is not preemptible"):
        cut.preempt(whole)
    results = await asyncio.gather(step, whole, last)
    assert [type(result) for result in results] == [StepResult, StepResult, Suspended]
    assert cut.state.segments is not None and cut._suspended[3].walk is not None
    done = await cut.submit(StepPlan(4, (span,), preemptible=True, resume=3))
    assert isinstance(done, StepResult)
    with pytest.raises(InvalidValue, match="resumes step 3, which is not suspended"):
        cut.submit(StepPlan(5, (), preemptible=True, resume=3))
    cut.release([0, 1])


def test_a_step_that_raises_discards_suspended_steps(
    cut: JaxExecutor, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """This includes one that raises between two segments; their device memory is freed."""

    async def scenario(fails: StepPlan) -> weakref.ref[jax.Array]:
        held = Job(PROMPTS[3], slot=0)
        _, stops = await stepwise_stopped(cut, held)
        assert stops == 1 and len(cut._suspended) == 1
        walk = cut._suspended[1].walk
        assert walk is not None and walk.stream is not None
        activations = weakref.ref(walk.stream.x)
        del walk

        def fault(plan: StepPlan) -> None:
            if plan.step == fails.step:
                raise RuntimeError("on purpose")

        cut.fault, cut.pace = fault, SegmentPace(1)
        with pytest.raises(StepFailed, match="on purpose"):
            await cut.submit(fails)
        cut.fault = None
        with pytest.raises(StepFailed):
            cut.submit(StepPlan(9, (Job(PROMPTS[0]).span(),)))
        cut.rebuild()
        with pytest.raises(InvalidValue, match="not suspended"):
            cut.submit(StepPlan(9, (), preemptible=True, resume=1))
        return activations

    for preemptible, resume in ((True, None), (False, None), (True, 1)):
        other = Job(PROMPTS[2], slot=1)
        activations = run(scenario(StepPlan(7, (other.span(20),), preemptible=preemptible, resume=resume)))
        caplog.clear()  # drop the error with the frames that it references
        gc.collect()
        assert activations() is None
        assert alone(cut, Job(PROMPTS[1], PARAMS[1], seed=7), NEW) == expected[1]


async def stepwise_stopped(executor: JaxExecutor, job: Job) -> tuple[Step, int]:
    executor.pace = SegmentPace(1)
    step = executor.submit(StepPlan(1, (job.span(20),), preemptible=True))
    executor.preempt(step)
    return step, int(isinstance(await step, Suspended))


@in_loop
async def test_steps_with_decodes_and_single_token_steps_run_as_a_whole(cut: JaxExecutor) -> None:
    job = Job(PROMPTS[0], slot=0)
    step = cut.submit(StepPlan(1, (job.span(1),), preemptible=True))  # the bucket of one token per row
    cut.preempt(step)
    assert isinstance(await step, StepResult)
    cut.release([0])


def test_bytes_held_by_a_suspended_step(cut: JaxExecutor) -> None:
    """They are those of the outputs of `begin`: activations, rotary tables, and rows and tables of the attention."""
    segments, state = cut.state.segments, cut.state
    assert isinstance(segments, Segments)
    job = Job(PROMPTS[3], slot=0)
    run(stepwise_stopped(cut, job))
    walk = cut._suspended[1].walk
    assert walk is not None
    real = sum(leaf.nbytes for leaf in jax.tree.leaves((walk.stream, walk.last)))
    assert segments.held_bytes(outside(state.weights)) == real
    cut.rebuild()
