"""Measure how soon a short prompt starts while a long one is computed, and the cost of preemptible steps.

For each chunk size and boundary: while a step computes a chunk of a long prompt, a short prompt arrives at a random
time, and the step is asked to stop. Wait: from the arrival to the submission of the short prompt's step. Segments are
dispatched by their time, as served, or (`depth`) a fixed number at a time.

Also reports the overhead of segments without preemption: their time relative to the same chunk as one program, of
medians, of minima, and of CPU time. The two alternate, so that other load on the machine slows both.

On a GPU: `python benchmarks/preemption.py --model llama3-8b --chunks 512,2048,8192 --context 32768 --dtype bfloat16`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import common
from engine_bench import stops
from engine_bench.steps import built, default_page, once, positions

from jaxserve.engine.programs.mesh import plan_mesh
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.startup.build import ExecutorConfig, random_init
from jaxserve.models import registry
from jaxserve.models.published import published_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.report.table import print_table


def spec_of(args: argparse.Namespace) -> ModelSpec:
    spec = registry.load_spec(common.DEMO) if args.model == "demo" else published_spec(args.model)
    length = stops.room(args.context, max(args.chunks), default_page())
    return positions(replace(spec, layers=args.layers or spec.layers), length)


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    spec, weights = spec_of(args), once(random_init())

    def made(chunk: int, boundary: str) -> JaxExecutor:
        page = default_page()
        config = ExecutorConfig(
            spec=spec, load=weights, mesh=plan_mesh(f"1x{args.tp}"), max_num_seqs=4,
            max_num_batched_tokens=chunk, max_model_len=stops.room(args.context, chunk, page),
            dtype=args.dtype, preempt_boundary=boundary, page_size=page,
            kv_cache_memory=args.kv_cache_memory, warm=False,
        )  # fmt: skip
        return built(config)

    yield from stops.rows(
        spec, made, chunks=args.chunks, boundaries=args.boundaries, depths=args.depths, context=args.context,
        runs=args.runs, arrivals=args.arrivals,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="demo, or a model of configs/model/published.yaml [demo]")
    parser.add_argument("--layers", type=int, help="number of layers instead of the model's")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--chunks", type=lambda text: [int(x) for x in text.split(",")], default=[512, 1024])
    parser.add_argument("--context", type=int, default=0, help="tokens of the long prompt before the chunk [0]")
    parser.add_argument("--boundaries", type=lambda text: text.split(","), default=["op", "layer", "layers:2", "chunk"])
    parser.add_argument(
        "--depths", type=lambda text: [int(x) or None for x in text.split(",")], default=[None, 1, 2],
        help="segments in flight; 0: by their time [0,1,2]",
    )  # fmt: skip
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
        "wait_p50_ms", "wait_p99_ms", "wait_p50_share", "wait_p99_share", "lead_ms", "first_token_p50_ms",
    ]  # fmt: skip
    print_table(f"preemption, {args.model}", columns, [[row[name] for name in columns] for row in found])
    common.save(args, {"rows": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
