"""Executors whose weights are made once, and the steps that measure them."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
from jax.sharding import Mesh

from jaxserve.engine.memory.kv import default_page_size
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.startup.build import ExecutorConfig, LoadWeights, build_executors
from jaxserve.models.spec import ModelSpec
from jaxserve.sched.api.executor import Step
from jaxserve.sched.api.plan import Span, StepPlan, StepResult, decoding
from jaxserve.sched.api.policy import Limits
from jaxserve.sched.perf import profile
from jaxserve.sched.perf.profile import Probe, Row

Spans = tuple[Span, ...]
AHEAD = 2  # steps queued behind the running one


def once(load: LoadWeights) -> LoadWeights:
    """Return a loader that calls `load` the first time, and again only for other weights or meshes."""
    kept: dict[Any, list[Any]] = {}

    def loaded(spec: ModelSpec, dtype: Any, meshes: Sequence[Mesh]) -> list[Any]:
        key = spec, str(dtype), tuple(meshes)
        if key not in kept:
            kept.clear()  # two models may not fit
            kept[key] = load(spec, dtype, meshes)
        return kept[key]

    return loaded


def positions(spec: ModelSpec, length: int) -> ModelSpec:
    """Return the spec with enough positions for `length` tokens; harmless, because weights are random."""
    return replace(spec, max_positions=max(spec.max_positions, length))


def built(config: ExecutorConfig) -> JaxExecutor:
    """Build the executor of a mesh of one instance."""
    (executor,) = build_executors(config)
    return executor


def closed(executors: Sequence[JaxExecutor]) -> None:
    """Close executors and free their pools, so that others fit. The caller must drop its references to them."""

    async def closing() -> None:
        for executor in executors:
            await executor.close()
            executor.state.pools = []

    asyncio.run(closing())
    gc.collect()


def limits_of(executor: JaxExecutor) -> Limits:
    """Return an executor's limits as the scheduler sees them."""
    made = executor.state.programs.limits
    return Limits(made.tokens, made.slots, made.pages, made.page_size)


def spans_of(executor: JaxExecutor, rows: Sequence[Row], decodes: int) -> Spans:
    """Return a step over pages that nothing has written, which does not change its time; decodes come first."""
    return profile.spans(Probe(tuple(rows), decodes), limits_of(executor))


def decodes_of(executor: JaxExecutor, rows: int, context: int) -> Spans:
    """Return a step of `rows` decodes that attend to `context` tokens each, their own included."""
    return spans_of(executor, (Row(context - 1, 1),) * rows, rows)


def repeated(spans: Spans) -> Spans:
    """Return the same decodes for the steps after the first, which began the requests in their slots."""
    return tuple(decoding(span.request, span.slot, span.start) for span in spans)


async def submitted(executor: JaxExecutor, spans: Spans, *, preemptible: bool = False) -> StepResult:
    """Run one step to its end."""
    result = await executor.submit(StepPlan(1, spans, preemptible))
    assert isinstance(result, StepResult)
    return result


async def ends(executor: JaxExecutor, spans: Spans, more: Callable[[int], bool], ahead: int = AHEAD) -> list[float]:
    """Run a step as long as `more(steps so far)` holds, with `ahead` others queued; return when each ended."""
    flying: deque[Step] = deque()
    found: list[float] = []

    async def first() -> None:
        result = await flying.popleft()
        assert isinstance(result, StepResult)
        found.append(result.finished)

    while more(len(found) + len(flying)):
        flying.append(executor.submit(StepPlan(1, spans)))
        if len(flying) > ahead:
            await first()
    while flying:
        await first()
    return found


async def queued(executor: JaxExecutor, spans: Spans, count: int) -> list[float]:
    """Return the seconds of `count` steps while others are queued: what the device needs."""
    found = await ends(executor, spans, lambda done: done <= count)
    return [after - before for before, after in pairwise(found)]


def default_page() -> int:
    """Return the page size that the engine uses on this platform."""
    return default_page_size(jax.default_backend())
