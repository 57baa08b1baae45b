"""Preemption inside prompt steps: when they stop, and what their segments cost."""

from __future__ import annotations

from benchmarks.engine_bench import stops
from benchmarks.engine_bench.steps import default_page, once
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.startup.build import random_init

from . import engine
from .environment import prepare
from .part import Run

CONTEXT = 8192  # tokens of the long prompt before the chunk
POOL = 4 << 30
RUNS, ARRIVALS = 10, 100


def measure(run: Run, chunk: int, boundaries: list[str], depths: list[int]) -> None:
    """Fill the table `preemption`, a row for each boundary and depth, with weights that are made once."""
    prepare(run)
    pool, context = (engine.SMALL, 0) if run.dry else (POOL, CONTEXT)
    length, weights = stops.room(context, chunk, default_page()), once(random_init())

    def made(tokens: int, boundary: str) -> JaxExecutor:
        executor = engine.executor_of(
            run, rows=4, tokens=tokens, length=length, pool=pool, load=weights, preempt_boundary=boundary
        )
        engine.compile_first(run, executor.state, engine.buckets(executor, (), (stops.SHORT, tokens)))
        return executor

    for row in stops.rows(
        engine.spec_of(run), made, chunks=[chunk], boundaries=boundaries, depths=depths, context=context,
        runs=2 if run.dry else RUNS, arrivals=4 if run.dry else ARRIVALS,
    ):  # fmt: skip
        run.row("preemption", context=context, **row)
