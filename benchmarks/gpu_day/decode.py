"""Decode steps of the engine against the bytes that they must read, and the host time of each."""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import Any

from benchmarks.engine_bench.steps import Spans, decodes_of, queued, repeated, submitted
from jaxserve.engine.programs.inputs import InputBuilder, SlotTable
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.runtime.results import read
from jaxserve.sched.api.plan import StepPlan

from . import engine, floors
from .environment import accepted, cache, prepare
from .part import Run

ROWS = (64, 1, 256, 8)  # the most important first
CONTEXTS = (1024, 4096, 16384)
SIZES = {"rows": 256, "tokens": 8192, "length": 16384}
STEPS = 24
DRY = {"rows": 4, "tokens": 64, "length": 64}
MARGIN = 10.0  # seconds of the part's limit that are left alone
UPDATED = 64  # rows of the decode step that compares the modes of updating command buffers


def measure(run: Run) -> None:
    """Fill the tables `decode step` and `host`."""
    prepare(run)
    executor = engine.executor_of(run, **sizes(run))
    rows, contexts = ((4, 1), (16, 32)) if run.dry else (ROWS, CONTEXTS)
    engine.compile_first(run, executor.state, engine.buckets(executor, rows))
    for context in contexts:
        for count in rows:
            run.row("decode step", rows=count, context=context, **_point(run, executor, count, context))
    for count in rows:
        run.row("host", rows=count, context=contexts[0], **asyncio.run(host(executor, count, contexts[0], steps(run))))


def sizes(run: Run) -> dict[str, int]:
    """Return the limits of the executor that decodes, equal in all parts so that programs are compiled once."""
    return DRY if run.dry else SIZES


def steps(run: Run) -> int:
    return 3 if run.dry else STEPS


def _point(run: Run, executor: JaxExecutor, rows: int, context: int) -> dict[str, Any]:
    """Return the figures of one size, or why it was not measured."""
    pages = rows * -(-context // executor.page_size)
    if pages > executor.pages:
        return {"skipped": f"needs {pages} pages, the pool has {executor.pages}"}
    if run.left() < MARGIN:
        return {"skipped": "no time left"}
    seconds = asyncio.run(_queued(executor, rows, context, steps(run)))
    spec, dtype = executor.state.programs.spec, executor.state.weights["embed"].dtype
    size = floors.decode_bytes(spec, dtype, rows, context)
    return {
        "step_ms": 1e3 * median(seconds),
        "best_ms": 1e3 * min(seconds),
        "tokens_s": rows / median(seconds),
        **floors.against_bytes(run.facts, median(seconds), size),
    }


async def _queued(executor: JaxExecutor, rows: int, context: int, count: int) -> list[float]:
    spans = decodes_of(executor, rows, context)
    await submitted(executor, spans)
    return await queued(executor, repeated(spans), count)


async def host(executor: JaxExecutor, rows: int, context: int, count: int) -> dict[str, float]:
    """Return a decode step's time with others queued and without, and its host time in parts, in ms.

    exposed_ms: what each step takes longer if it is submitted only after the last one's result.
    """
    spans = decodes_of(executor, rows, context)
    await submitted(executor, spans)
    more = repeated(spans)
    step = median(await queued(executor, more, count))
    submits, alone = await _alone(executor, more, count)
    found = {"step_ms": step, "awaited_ms": alone, "exposed_ms": alone - step, "submit_ms": submits}
    return {name: 1e3 * seconds for name, seconds in (found | _parts(executor, spans, count)).items()}


async def _alone(executor: JaxExecutor, spans: Spans, count: int) -> tuple[float, float]:
    """Return the median seconds of submitting a step while none runs, and until its result."""
    times = []
    for _ in range(count):
        began = executor.now()
        step = executor.submit(StepPlan(1, spans))
        sent = executor.now()
        await step
        times.append((sent - began, executor.now() - began))
    sending, whole = zip(*times, strict=True)
    return median(sending), median(whole)


def _parts(executor: JaxExecutor, spans: Spans, count: int) -> dict[str, float]:
    """Return the median seconds of building a step's inputs, dispatching its two programs, and reading its result."""
    state = executor.state
    limits = state.programs.limits
    slots, builder, more = SlotTable(limits), InputBuilder(limits), repeated(spans)
    for span in spans:
        assert span.begin is not None
        slots.begin(span.slot, span.begin)
        slots.extend(span.slot, span.new_pages)
    times: list[tuple[float, ...]] = []
    for _ in range(count):
        begun = time.perf_counter()
        batch = builder.build(more, slots)
        made = time.perf_counter()
        program = state.programs.step[batch.bucket]
        rows, state.pools, hidden = program(state.weights, state.pools, state.carry.tokens, batch.packed)
        dispatched = time.perf_counter()
        drawn = state.draw(batch, more, rows, hidden)
        sent = time.perf_counter()
        drawn.wait()
        ended = time.perf_counter()
        read(StepPlan(1, more), batch, drawn, sent, ended)
        times.append((made - begun, dispatched - made, sent - dispatched, time.perf_counter() - ended))
    names = "build_ms", "dispatch_ms", "draw_ms", "read_ms"
    return {name: median(found) for name, found in zip(names, zip(*times, strict=True), strict=True)}


def update_mode(run: Run, flags: str, mlp: str = "auto") -> None:
    """Fill a row of `update mode`: one decode step with these XLA flags, which a process reads once.

    mlp: backend of gate, up and SwiGLU, which is compared in the same way.

    The pool has a given size, because the allocator of modes that skip updates does not report its memory.
    """
    if not accepted(flags):
        run.row("update mode", flags=flags, skipped="this jaxlib does not know them")
        return
    prepare(run, flags)
    count = DRY["rows"] if run.dry else UPDATED
    kept = cache(run) / "".join(letter if letter.isalnum() else "-" for letter in flags or "default")
    context = 16 if run.dry else CONTEXTS[0]
    pool = engine.pool_of(run, max(2 * count * context, sizes(run)["length"]))
    # A folder of its own: programs keep the flags that they were compiled with.
    executor = engine.executor_of(run, **sizes(run), folder=kept, pool=pool, mlp_backend=mlp)
    engine.compile_first(run, executor.state, engine.buckets(executor, (count,)))
    found = asyncio.run(host(executor, count, context, steps(run)))
    run.row("update mode", flags=flags or "default", mlp=mlp, rows=count, context=context, **found)
