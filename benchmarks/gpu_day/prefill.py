"""Prompts through the engine against their floating-point operations, and the step-time model that it learns from."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.engine_bench.steps import limits_of, spans_of
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.sched.api.plan import StepPlan
from jaxserve.sched.perf.buckets import Buckets
from jaxserve.sched.perf.fit import fit
from jaxserve.sched.perf.linear import LinearModel
from jaxserve.sched.perf.profile import Row
from jaxserve.sched.perf.profile import measure as profiled

from . import decode, engine, floors
from .environment import prepare
from .part import Run

TOKENS = (128, 512, 2048, 8192, 32768, 1024, 4096, 16384)  # the most important first
SIZES = {"rows": 4, "tokens": 8192, "length": 32768, "pool": 8 << 30}
DRY = {"rows": 2, "tokens": 64, "length": 192}
RUNS = 5
PROFILED = 25.0  # seconds of the profile that the step-time model is fitted to
CHUNKS = (512, 2048)  # sizes of its steps with prompt tokens


def measure(run: Run) -> None:
    """Fill the table `prefill`: whole prompts, in chunks of the largest step."""
    prepare(run)
    executor = engine.executor_of(run, **(DRY if run.dry else SIZES))
    chunk = executor.state.programs.limits.tokens
    wanted = (32, 64, 128) if run.dry else TOKENS
    engine.compile_first(run, executor.state, engine.buckets(executor, (), [min(one, chunk) for one in wanted]))
    for tokens in wanted:
        if run.left() < decode.MARGIN:
            run.row("prefill", tokens=tokens, skipped="no time left")
            continue
        chunks = [Row(start, min(chunk, tokens - start)) for start in range(0, tokens, chunk)]
        run.row("prefill", tokens=tokens, chunks=len(chunks), **_prompt(run, executor, chunks))


def _prompt(run: Run, executor: JaxExecutor, chunks: list[Row]) -> dict[str, Any]:
    """Return the figures of a prompt. padded: the tokens that its programs compute."""
    times = [asyncio.run(_seconds(executor, chunks)) for _ in range(1 + (2 if run.dry else RUNS))][1:]
    padded = [engine.buckets(executor, (), [one.length])[0].tokens for one in chunks]
    operations = floors.chunk_flops(executor.state.programs.spec, chunks)
    return {
        "padded": sum(padded),
        "time_ms": 1e3 * median(times),
        "best_ms": 1e3 * min(times),
        "tokens_s": sum(one.length for one in chunks) / median(times),
        **floors.against_flops(run.facts, median(times), operations),
    }


async def _seconds(executor: JaxExecutor, chunks: list[Row]) -> float:
    """Return the seconds from the first chunk's start to the last one's end; all are submitted at once."""
    flying = [
        executor.submit(StepPlan(at, spans_of(executor, (chunk,), 0))) for at, chunk in enumerate(chunks)
    ]  # fmt: skip
    results = await asyncio.gather(*flying)
    return float(results[-1].finished - results[0].started)


def step_model(run: Run) -> None:
    """Fill the table `step model`: the coefficients fitted to a profile, and their errors on it.

    alpha is the time per token of the longest context in a step, beta that of all other contexts together.
    """
    prepare(run)
    sizes = decode.sizes(run)
    executor = engine.executor_of(run, **sizes)
    programs = engine.buckets(executor, *(((1, 4), (32,)) if run.dry else (sorted(decode.ROWS), CHUNKS)))
    engine.compile_first(run, executor.state, programs)
    made = Buckets(*(tuple(one.tokens for one in programs if one.decode is kind) for kind in (True, False)))
    limits = replace(limits_of(executor), tokens=made.mixed[-1])
    seconds = 1.0 if run.dry else PROFILED
    points = asyncio.run(profiled(executor, limits, sizes["length"], made, seconds))
    found = fit(points, buckets=made)
    one = found.coefficients
    run.row(
        "step model", form="general", fixed_ms=1e3 * one.fixed, prefill_us=1e6 * one.prefill,
        decode_us=1e6 * one.decode, alpha_ns=1e9 * one.longest, beta_ns=1e9 * one.context,
        quadratic_ps=1e12 * one.quadratic, points=found.steps,
        error=found.mape, worst=found.worst, **{f"error_{kind}": error for kind, error in found.by_kind.items()},
    )  # fmt: skip
    a, b, c = LinearModel.fitted(points).coefficients
    run.row("step model", form="linear", fixed_ms=1e3 * a, prefill_us=1e6 * b, decode_us=1e6 * b, beta_ns=1e9 * c)
    kept = [{**load._asdict(), "seconds": taken} for load, taken in points]
    (run.folder / "step-model.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
