"""Measure decode steps whose rows share a prefix: with cascade attention, and without.

On this machine: the same rows decode in an engine without cascade attention (1), in one with it that
is told of no group (what a step without groups costs), and in one that reads the prefix once. Steps
of the three alternate, so that other load slows all alike; ratios to the first are medians over steps.

By bytes: what a decode step of Llama 3 8B in bfloat16 reads, weights included, as a ratio. Simulated:
the mean time per output token of requests that share a prefix on four H200, by a latency preset.
Neither has run on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any

import common
from engine_bench.steps import built, closed, decodes_of, default_page, once, positions, repeated

from jaxserve.config import preset
from jaxserve.engine.programs.mesh import plan_mesh
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.startup.build import ExecutorConfig, random_init
from jaxserve.models import registry
from jaxserve.models.published import published_spec
from jaxserve.report.table import print_table
from jaxserve.sched.api.plan import SharedPrefix, Span, StepPlan, StepResult
from jaxserve.sched.api.policy import Limits
from jaxserve.sched.instance.prefix_groups import PrefixGroups
from jaxserve.sched.perf import profile
from jaxserve.sched.perf.profile import Probe, Row
from jaxserve.sched.sim.arrival import Arrival
from jaxserve.sched.sim.latency import Latency
from jaxserve.sched.sim.options import Options
from jaxserve.sched.sim.simulate import simulate
from jaxserve.yamlio import load_yaml
from pallas_kernels.ops.paged_attention.cascade import DECODE_QUERIES

OWN = 64  # tokens of each row after the prefix
PAGE = 16  # tokens, of the scheduler's pages in `grouping` and `read`
MODEL, WEIGHTS, PER_TOKEN = "llama3-8b", 16.06e9, 131072  # bytes of weights, and of the KV of a token, in bfloat16
PRESET, OUTPUT = "minimax-m2.5-h200-tp4", 128


def sharing(spans: Sequence[Span], pages: int) -> tuple[Span, ...]:
    """Return the spans with the first `pages` pages of the first one."""
    first = spans[0].new_pages[:pages]
    return tuple(span._replace(new_pages=(*first, *span.new_pages[pages:])) for span in spans)


async def paired(executors: Sequence[JaxExecutor], rows: int, prefix: int, steps: int) -> list[list[float]]:
    """Return the seconds of decode steps: without cascade attention, with it but no group, and with one."""
    pages = prefix // executors[0].page_size
    spans = sharing(decodes_of(executors[0], rows, prefix + OWN), pages)
    group = (SharedPrefix(tuple(range(rows)), pages, rows),)
    kinds = [(executors[0], ()), (executors[1], ()), (executors[1], group)]
    for executor in executors:
        await executor.submit(StepPlan(0, spans))
    found: list[list[float]] = [[] for _ in kinds]
    for step in range(steps + 1):
        for (executor, shared), seconds in zip(kinds, found, strict=True):
            result = await executor.submit(StepPlan(1 + step, repeated(spans), shared=shared))
            assert isinstance(result, StepResult)
            if step:  # the first one compiles
                seconds.append(result.finished - result.started)
    return found


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure steps on this machine."""
    spec = registry.load_spec(common.DEMO) if args.model == "demo" else published_spec(args.model)
    spec = positions(replace(spec, layers=args.layers or spec.layers), max(args.prefixes) + OWN)
    weights, found, page = once(random_init()), [], default_page()
    length = -(-(max(args.prefixes) + OWN) // page) * page
    for rows in args.rows:
        config = ExecutorConfig(
            spec=spec, load=weights, mesh=plan_mesh("1x1"), max_num_seqs=rows, max_num_batched_tokens=64,
            max_model_len=length, page_size=page, kv_cache_memory=args.kv_cache_memory, warm=False,
        )  # fmt: skip
        executors = [built(replace(config, cascade_attention=cascade)) for cascade in ("off", "on")]
        for prefix in args.prefixes:
            plain, none, one = asyncio.run(paired(executors, rows, prefix, args.steps))
            found.append({
                "rows": rows, "prefix": prefix, "plain_s": median(plain), "no_group": ratio(none, plain),
                "group": ratio(one, plain), "bytes": read(rows, prefix),
            })  # fmt: skip
        closed(executors)
    return found


def ratio(seconds: Sequence[float], plain: Sequence[float]) -> float:
    return median(mine / theirs for mine, theirs in zip(seconds, plain, strict=True))


def read(rows: int, prefix: int) -> float:
    """Return what a decode step of MODEL reads with the prefix read once per tile of rows, relative to once per row."""
    tiles = -(-rows // DECODE_QUERIES)
    return (WEIGHTS + PER_TOKEN * (tiles * prefix + rows * OWN)) / (WEIGHTS + PER_TOKEN * rows * (prefix + OWN))


def simulated(rows: int, prefix: int) -> dict[str, Any]:
    """Simulate requests that arrive together, after one that computed their prefix."""
    latency, block = load_yaml(preset("latency", PRESET), Latency), 64
    names = tuple(range(prefix // block))
    arrivals = [Arrival(30.0 * (id > 0), prefix + OWN, OUTPUT, hash_ids=names, block=block) for id in range(rows + 1)]
    times = []
    for cascade in (False, True):
        options = Options(perf="exact", cascade=cascade)
        made = simulate(arrivals, "sarathi", "1x4", latency, options=options)
        times.append(mean(one.tpot for one in made.measured[1:]))
    return {"rows": rows, "prefix": prefix, "tpot_s": times[0], "cascade": times[1] / times[0]}


def grouping(rows: int, pages: int, shared: int, times: int = 50) -> float:
    """Return the CPU seconds in which the scheduler finds the groups of rows that share some of their pages."""
    limits = Limits(rows=rows, pages=rows * pages, page_size=PAGE)
    spans = sharing(profile.spans(Probe((Row(pages * PAGE - 1, 1),) * rows, rows), limits), shared)
    made = PrefixGroups(rows, PAGE)
    assert len(made.groups(spans)) == (shared > 0)
    spans, seconds = repeated(spans), []
    for _ in range(times):
        began = time.process_time()
        made.groups(spans)
        seconds.append(time.process_time() - began)
    return median(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="demo, or a model of configs/model/published.yaml [demo]")
    parser.add_argument("--layers", type=int, help="leading layers of the model [all]")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32], help="rows of a step [8 16 32]")
    parser.add_argument("--prefixes", type=int, nargs="+", default=[1024, 4096, 8192], help="tokens [1024 4096 8192]")
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each kind [15]")
    parser.add_argument("--kv-cache-memory", type=int, default=1 << 30, help="bytes of an engine's pool [1 GiB]")
    common.add_output(parser, "cascade")
    args = parser.parse_args()
    steps = measured(args)
    served = [simulated(row["rows"], row["prefix"]) for row in steps]
    rows = [
        [
            row["rows"], row["prefix"], f"{1e3 * row['plain_s']:.1f}", f"{row['no_group']:.3f}", f"{row['group']:.2f}",
            f"{row['bytes']:.2f}", f"{one['cascade']:.2f}",
        ]
        for row, one in zip(steps, served, strict=True)
    ]  # fmt: skip
    columns = ["rows", "prefix", "plain, ms", "no group", "one group", f"bytes, {MODEL}", "TPOT, simulated"]
    print_table("decode steps, relative to plain attention", columns, rows)
    host = [
        {"rows": count, "pages": 512, "shared": shared, "cpu_s": grouping(count, 512, shared)}
        for count in (64, 256)
        for shared in (0, 64, 508)
    ]
    cells = [[row["rows"], row["pages"], row["shared"], f"{1e6 * row['cpu_s']:.0f}"] for row in host]
    print_table("CPU time to find the groups of a step", ["rows", "pages", "shared", "microseconds"], cells)
    common.save(args, {"steps": steps, "simulated": served, "grouping": host})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
