"""Hand-written plans for executors, without a scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxserve.engine.programs.mesh import plan_mesh
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.startup.build import ExecutorConfig, build_early, build_executors, from_folder
from jaxserve.engine.startup.warmup import Ladder
from jaxserve.models import registry
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Begin, Span, StepPlan, StepResult, TokenLogprobs

R = TypeVar("R")
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
SLOTS, PAGE, LENGTH = 8, 4, 64
ROW_PAGES = LENGTH // PAGE
POOL = 200 << 10  # bytes per instance: 200 pages of the tiny model


def executors(folder: Path, mesh: str = "1x1", **options: Any) -> list[JaxExecutor]:
    return build_executors(settings_of(folder, mesh, **options))


def early_executors(folder: Path, mesh: str = "1x1", **options: Any) -> tuple[list[JaxExecutor], Ladder | None]:
    """As `executors`, with the first programs only, and the ladder that makes the others."""
    return build_early(settings_of(folder, mesh, **options))


def settings_of(folder: Path, mesh: str, **options: Any) -> ExecutorConfig:
    plan = plan_mesh(mesh)
    settings: dict[str, Any] = {
        "max_num_seqs": SLOTS,
        "max_num_batched_tokens": 32,
        "max_model_len": LENGTH,
        "page_size": PAGE,
        "kv_cache_memory": POOL * plan.instances,
    }
    load = from_folder(folder)
    settings["spec"] = registry.load_spec(folder)
    return ExecutorConfig(load=load, mesh=plan, **settings | options)


@dataclass
class Job:
    """A request with its slot and pages."""

    prompt: tuple[int, ...]
    params: SamplingParams = GREEDY
    slot: int = 0
    seed: int = 0
    eos: tuple[int, ...] = ()
    pages: tuple[int, ...] = ()
    computed: int = 0
    sampled: int = 0  # sampled tokens, in flight or returned
    begun: bool = False
    told: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    failed: str | None = None

    def __post_init__(self) -> None:
        self.pages = self.pages or tuple(range(self.slot * ROW_PAGES, (self.slot + 1) * ROW_PAGES))

    def span(self, chunk: int = LENGTH) -> Span:
        """Return the span of the next `chunk` prompt tokens, or of one decode token."""
        known = len(self.prompt) + self.sampled
        length = min(chunk, known - self.computed)
        start, end = self.computed, self.computed + length
        held = (*self.prompt, *self.output)
        tokens = held[start:end] if end <= len(held) and not (length == 1 and start >= len(self.prompt)) else ()
        if not self.begun:
            tokens = held[start:end]
        need = -(-end // PAGE)
        fresh = self.pages[self.told : need]
        begin = None
        if not self.begun:
            history = self.params.prompt_logprobs is not None or self.params.repetition_penalty != 1
            history = history or self.params.presence_penalty != 0 or self.params.frequency_penalty != 0
            prompt, output = (self.prompt, tuple(self.output)) if history else ((), ())
            begin = Begin(self.params, self.seed, prompt, output, len(self.prompt), self.eos)
        self.begun, self.told, self.computed = True, max(need, self.told), end
        samples = end == known
        self.sampled += samples
        return Span(self.slot, self.slot, start, length, fresh, tokens, 0, samples, begin)

    def settle(self, result: StepResult, index: int) -> None:
        self.output += result.tokens[index]
        self.logprobs += result.logprobs.get(index, ())
        self.prompt_logprobs += result.prompt_logprobs.get(index, ())
        self.failed = result.failed.get(index, self.failed)


async def generate(
    executor: JaxExecutor, jobs: Sequence[Job], count: int, *, chunk: Callable[[], int] = lambda: 12, ahead: bool = True
) -> None:
    """Run jobs together until each has `count` tokens. `ahead`: plan a step before the previous one has returned."""
    running: list[tuple[asyncio.Future[Any], list[Job]]] = []
    while running or any(job.sampled < count for job in jobs):
        mine = [job for job in jobs if job.sampled < count]
        if mine:
            plan = StepPlan(0, tuple(job.span(chunk()) for job in mine))
            running.append((executor.submit(plan), mine))
        if len(running) > (1 if ahead and mine else 0):
            step, settled = running.pop(0)
            result = await step
            for index, job in enumerate(settled):
                job.settle(result, index)
    executor.release([job.slot for job in jobs])


def alone(executor: JaxExecutor, job: Job, count: int) -> list[int]:
    run(generate(executor, [job], count))
    return job.output


def run(work: Coroutine[Any, Any, R]) -> R:
    return asyncio.run(work)


def finite_pages(executor: JaxExecutor, pages: Sequence[int]) -> bool:
    """Return whether all numbers in these pages, over all layers, are finite."""
    kv_buffer = executor.export_kv(pages)
    return all(bool(np.isfinite(np.asarray(leaf)).all()) for _, piece in kv_buffer.pieces for leaf in piece)
