"""How soon a running prompt step stops for a short prompt, and what its segments cost."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np

from jaxserve.engine.programs.segments import links
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.runtime.segment_pace import SegmentPace
from jaxserve.models.spec import ModelSpec
from jaxserve.sched.api.plan import StepPlan, Suspended
from jaxserve.sched.api.preemption import Boundary
from jaxserve.sched.perf.profile import Row

from .steps import Spans, closed, spans_of, submitted

SHORT = 64  # tokens of the short prompt


def room(context: int, chunk: int, page: int) -> int:
    """Return the tokens that a pool must hold for a chunk after `context` and the short prompt, on pages of `page`."""
    return context + chunk + SHORT + page


async def step(executor: JaxExecutor, spans: Spans, preemptible: bool) -> tuple[float, float]:
    """Run a step, and return its wall-clock and CPU seconds."""
    began, worked = executor.now(), time.process_time()
    await submitted(executor, spans, preemptible=preemptible)
    return executor.now() - began, time.process_time() - worked


async def interrupted(executor: JaxExecutor, long: Spans, short: Spans, after: float) -> tuple[float, float]:
    """Return the seconds from the arrival to the submission of the short step, and to its first token."""
    running = executor.submit(StepPlan(1, long, preemptible=True))
    await asyncio.wait([running], timeout=after)
    arrival = executor.now()
    executor.preempt(running)
    stopped = await running
    begun = executor.now()
    await executor.submit(StepPlan(2, short, preemptible=True))
    answered = executor.now()
    if isinstance(stopped, Suspended):
        await executor.submit(StepPlan(3, long, preemptible=True, resume=1))
    return begun - arrival, answered - arrival


async def measured(
    executor: JaxExecutor, chunk: int, depth: int | None, *, context: int, runs: int, arrivals: int
) -> dict[str, Any]:
    """Measure one boundary. Times are in ms, `tokens_s` of a step in segments.

    depth: segments in flight; None: as served, by their time.
    """
    draw, executor.pace = random.Random(1), SegmentPace(depth)
    begun = spans_of(executor, (Row(context, chunk), Row(0, SHORT)), 0)
    long, short = begun[:1], begun[1:]
    for preemptible in (False, True):
        await step(executor, long, preemptible)
        await step(executor, short, preemptible)
    whole, pieces = [], []
    for _ in range(runs):
        whole.append(await step(executor, long, False))
        pieces.append(await step(executor, long, True))
    taken, cut = median(one for one, _ in whole), median(one for one, _ in pieces)
    waits, answers = [], []
    for _ in range(arrivals):
        wait, answer = await interrupted(executor, long, short, draw.random() * cut)
        waits.append(wait)
        answers.append(answer)
    p50, p99 = (float(x) for x in np.percentile(waits, [50, 99]))
    return {
        "segments": executor.pieces,
        "whole_ms": 1e3 * taken,
        "pieces_ms": 1e3 * cut,
        "tokens_s": chunk / cut,
        "loss": median(b[0] / a[0] for a, b in zip(whole, pieces, strict=True)) - 1,
        "loss_of_best": min(one for one, _ in pieces) / min(one for one, _ in whole) - 1,
        "loss_of_work": median(one for _, one in pieces) / median(one for _, one in whole) - 1,
        "wait_p50_ms": 1e3 * p50,
        "wait_p99_ms": 1e3 * p99,
        "wait_p50_share": p50 / taken,
        "wait_p99_share": p99 / taken,
        "first_token_p50_ms": 1e3 * median(answers),
        "lead_ms": 1e3 * executor.pace.lead,
    }


def rows(
    spec: ModelSpec,
    made: Callable[[int, str], JaxExecutor],
    *,
    chunks: Sequence[int],
    boundaries: Sequence[str],
    depths: Sequence[int | None],
    context: int,
    runs: int,
    arrivals: int,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each chunk size, boundary and depth; made(chunk, boundary): builds an executor."""
    for chunk in chunks:
        for boundary in boundaries:
            cut = Boundary.parse(boundary)
            executor = made(chunk, boundary)
            for depth in depths if cut.layers else (None,):
                if depth is not None and depth >= len(links(spec, cut)):
                    continue
                one = measured(executor, chunk, depth, context=context, runs=runs, arrivals=arrivals)
                found = asyncio.run(one)
                yield {"chunk": chunk, "boundary": boundary, "depth": depth, "layers": spec.layers, **found}
            closed([executor])
            del executor
