"""Measure how soon a short prompt starts while a long one is computed, and the cost of preemptible steps.

For each chunk size, boundary and depth: while a step computes a chunk of a long prompt, a short prompt arrives at a
random time, and the step is asked to stop. Latency: from the arrival to the submission of the short prompt's step.
Expected: a 99th percentile of at most (depth + 1) segments + 0.5 ms.

Also reports the overhead of segments without preemption: their time relative to the same chunk as one program, of
medians, of minima, and of CPU time. The two alternate, so that other load on the machine slows both.

On a GPU: `python benchmarks/preemption.py --model llama3-8b --chunks 512,2048,8192 --context 32768 --dtype bfloat16`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import common
import jax
import numpy as np

from jaxserve.engine.programs.mesh import plan_mesh
from jaxserve.engine.programs.segments import links
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.startup import build
from jaxserve.models import registry
from jaxserve.models.published import published_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.report.table import print_table
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Begin, Span, StepPlan, StepResult, Suspended
from jaxserve.sched.api.preemption import Boundary

SHORT = 64  # tokens of the short prompt
GREEDY = SamplingParams(temperature=0.0)
Spans = tuple[Span, ...]


def spec_of(args: argparse.Namespace) -> ModelSpec:
    """Return the model's spec with enough positions for any prompt; weights are random, so this is harmless."""
    spec = registry.load_spec(common.DEMO) if args.model == "demo" else published_spec(args.model)
    length = args.context + max(args.chunks) + SHORT
    return replace(spec, layers=args.layers or spec.layers, max_positions=max(spec.max_positions, length))


def executor_of(args: argparse.Namespace, chunk: int, boundary: str) -> JaxExecutor:
    spec = spec_of(args)
    config = build.ExecutorConfig(
        spec=spec, load=build.random_init(), mesh=plan_mesh(f"1x{args.tp}"), max_num_seqs=4,
        max_num_batched_tokens=chunk, max_model_len=args.context + chunk + SHORT,
        dtype=args.dtype, preempt_boundary=boundary,
        page_size=16 if jax.default_backend() == "cpu" else 64,
        kv_cache_memory=args.kv_cache_memory, warm=False,
    )  # fmt: skip
    return build.build_executors(config)[0]


def span(executor: JaxExecutor, slot: int, start: int, length: int) -> Spans:
    """Return a chunk that starts at `start`, over unwritten pages: their contents do not change the time."""
    each = executor.pages // 2
    pages = range(slot * each, slot * each - (-(start + length) // executor.page_size))
    begin = Begin(GREEDY, 0, (), (), start + length, ())
    return (Span(1 + slot, slot, start, length, tuple(pages), (7,) * length, 0, True, begin),)


async def step(executor: JaxExecutor, spans: Spans, preemptible: bool) -> tuple[float, float]:
    """Run a step, and return its wall-clock and CPU seconds."""
    began, worked = executor.now(), time.process_time()
    result = await executor.submit(StepPlan(1, spans, preemptible))
    assert isinstance(result, StepResult)
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


async def measure(args: argparse.Namespace, executor: JaxExecutor, chunk: int, depth: int) -> dict[str, Any]:
    """Measure one row of the table. Times are in ms."""
    draw, executor.depth = random.Random(1), depth
    long, short = span(executor, 0, args.context, chunk), span(executor, 1, 0, SHORT)
    for preemptible in (False, True):
        await step(executor, long, preemptible)
        await step(executor, short, preemptible)
    whole, pieces = [], []
    for _ in range(args.runs):
        whole.append(await step(executor, long, False))
        pieces.append(await step(executor, long, True))
    taken, cut = median(one for one, _ in whole), median(one for one, _ in pieces)
    waits, answers = [], []
    for _ in range(args.arrivals):
        wait, answer = await interrupted(executor, long, short, draw.random() * cut)
        waits.append(wait)
        answers.append(answer)
    segments = 1 if executor.state.segments is None else len(executor.state.segments.links)
    p50, p99 = (float(x) for x in np.percentile(waits, [50, 99]))
    return {
        "segments": segments,
        "whole_ms": 1e3 * taken,
        "pieces_ms": 1e3 * cut,
        "loss": median(b[0] / a[0] for a, b in zip(whole, pieces, strict=True)) - 1,
        "loss_of_best": min(one for one, _ in pieces) / min(one for one, _ in whole) - 1,
        "loss_of_work": median(one for _, one in pieces) / median(one for _, one in whole) - 1,
        "wait_p50_ms": 1e3 * p50,
        "wait_p99_ms": 1e3 * p99,
        "wait_p50_share": p50 / taken,
        "wait_p99_share": p99 / taken,
        "first_token_p50_ms": 1e3 * median(answers),
        "bound_ms": 1e3 * (depth + 1) * cut / segments + 0.5,
    }


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    spec = spec_of(args)
    for chunk in args.chunks:
        for boundary in args.boundaries:
            cut = Boundary.parse(boundary)
            executor = executor_of(args, chunk, boundary)
            depths: Sequence[int] = args.depths if cut.layers else (1,)
            for depth in depths:
                if cut.layers and depth >= len(links(spec, cut)):
                    continue
                found = asyncio.run(measure(args, executor, chunk, depth))
                yield {"chunk": chunk, "boundary": boundary, "depth": depth, "layers": spec.layers, **found}
            asyncio.run(executor.close())
            del executor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="demo, or a model of configs/model/published.yaml [demo]")
    parser.add_argument("--layers", type=int, help="number of layers instead of the model's")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--chunks", type=lambda text: [int(x) for x in text.split(",")], default=[512, 1024])
    parser.add_argument("--context", type=int, default=0, help="tokens of the long prompt before the chunk [0]")
    parser.add_argument("--boundaries", type=lambda text: text.split(","), default=["op", "layer", "layers:2", "chunk"])
    parser.add_argument("--depths", type=lambda text: [int(x) for x in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--runs", type=int, default=12, help="steps of each kind, alternating [12]")
    parser.add_argument("--arrivals", type=int, default=60)
    parser.add_argument("--kv-cache-memory", type=int, default=None, help="bytes of the pool")
    common.add_output(parser, "preemption")
    args = parser.parse_args()
    found = []
    for row in rows(args):
        print(row, flush=True)
        found.append(row)
    columns = [
        "chunk", "boundary", "depth", "segments", "whole_ms", "loss", "loss_of_best", "loss_of_work",
        "wait_p50_ms", "wait_p99_ms", "wait_p50_share", "wait_p99_share", "bound_ms", "first_token_p50_ms",
    ]  # fmt: skip
    print_table(f"preemption, {args.model}", columns, [[row[name] for name in columns] for row in found])
    common.save(args, {"rows": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
