"""Attainment of a policy and router at fixed rates, cell by cell, and what a change of either moves.

Cells are workloads at a rate near their limit: of the papers, of traces (`--traces`, a folder with azure/ and
mooncake/), and mixtures of chat, retrieval and long documents that no paper has. Simulated on two instances. Each run
is stored as it ends, so that a run that was cut off continues. `--against FILE` prints the paired difference to another
result, in points: means over seeds, of which one alone moves by 1.5.

    python benchmarks/cells.py --traces ../traces
    python benchmarks/cells.py --only mix3 --routing unified:reserve=0.5 --output half.json --against cells.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import common

from jaxserve.config import preset
from jaxserve.report.table import print_table
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.sim import NAMED, Arrival, Latency, Mesh, Mix, Options, Workload, load_trace, simulate
from jaxserve.sched.sim.draws import Arrivals
from jaxserve.sched.sim.workload import Lengths, Share
from jaxserve.yamlio import load_yaml

Source = Workload | Mix | list[Arrival]
CONVERSATION = "azure/AzureLLMInferenceTrace_conv.head40min.csv.gz"
CODE = "azure/AzureLLMInferenceTrace_code.head38min.csv"
MOONCAKE = "mooncake/conversation_trace.head40min.jsonl.gz"
ARXIV = "mooncake/arxiv_mooncake_trace.head1000.jsonl"


class Cell(NamedTuple):
    source: Callable[[Path | None], Source]
    requests: int
    rates: tuple[float, ...]
    colocated: bool = False
    latency: str = "minimax"
    kv_scale: float = 1.0  # of the pages that an instance has


def lognormal(mean: float, std: float, low: int, high: int) -> Lengths:
    return Lengths("lognormal", mean=mean, std=std, low=low, high=high)


def task(name: str, share: float, prompt: Lengths, output: Lengths, ttft: float, tpot: float) -> Share:
    return Share(share, Workload(name, prompt, output, ttft=ttft, tpot=tpot, request_class=name))


def mixture(chats: float, *more: Share) -> Mix:
    chat = task("chat", chats, lognormal(300, 300, 8, 4096), lognormal(200, 160, 4, 1024), 0.5, 0.03)
    return Mix("mixture", (chat, *more), Arrivals("gamma", cv=2.0))


def retrieval(share: float) -> Share:
    return task("rag", share, Lengths("uniform", low=6144, high=20480), lognormal(300, 200, 16, 1024), 3.0, 0.05)


DOCS = task("docs", 5, Lengths("uniform", low=65536, high=102400), lognormal(500, 300, 32, 2048), 20.0, 0.1)
MIX2, MIX3 = mixture(74, retrieval(26)), mixture(70, retrieval(25), DOCS)


def named(name: str) -> Callable[[Path | None], Source]:
    return lambda traces: NAMED[name]


def trace(name: str, ttft: float, spread: float = 0.0) -> Callable[[Path | None], Source]:
    def read(traces: Path | None) -> Source:
        assert traces is not None
        return load_trace(traces / name, slo=SLO(ttft, 0.05), num_prompts=1000, spread=spread)

    return read


CELLS = {
    "mix3": Cell(lambda traces: MIX3, 500, (5.0, 10.0, 25.0)),
    "mix3 colocated": Cell(lambda traces: MIX3, 300, (3.0, 5.0), colocated=True),
    "mix3, slow decodes": Cell(lambda traces: MIX3, 300, (4.0,), latency="slow"),
    "mix3, half the KV": Cell(lambda traces: MIX3, 500, (3.0,), kv_scale=0.5),
    "mix2 on H100, colocated": Cell(lambda traces: MIX2, 500, (26.0,), colocated=True, latency="h100"),
    "K128": Cell(named("K128"), 400, (7.0, 11.0)),
    "K128 colocated": Cell(named("K128"), 400, (7.5,), colocated=True),
    "K128, slow contexts": Cell(named("K128"), 1000, (4.0, 9.0), latency="contexts"),
    "K128, half the KV": Cell(named("K128"), 1000, (4.0, 6.0), kv_scale=0.5),
    "FlowPrefill's mix": Cell(named("flowprefill-llama3-70b"), 500, (36.0,)),
    "SLOs-Serve's mix": Cell(named("slos-serve-mixed"), 500, (21.0,)),
    "Azure conversation": Cell(trace(CONVERSATION, 2.0), 500, (33.0,)),
    "Azure code": Cell(trace(CODE, 2.0), 700, (4.3,)),
    "Mooncake conversation": Cell(trace(MOONCAKE, 8.0, 3.0), 300, (3.0,)),
    "Mooncake arXiv": Cell(trace(ARXIV, 8.0, 3.0), 1000, (9.0,)),  # many answers of three tokens
}
TRACES = ("Azure conversation", "Azure code", "Mooncake conversation", "Mooncake arXiv")


@cache
def latency(name: str) -> Latency:
    """Return step times: a preset, the same with slower decodes or contexts, or those assumed for an 8B model."""
    if name == "h100":
        return Latency(
            "h100-8b", 131_072, 430_000, tensor_parallel=1, page_size=16, link_bandwidth=50e9, link_latency=1e-3,
            layers=32, operators=5,
            coefficients=Coefficients(
                fixed=6e-3, prefill=2.4e-5, decode=1.2e-5, quadratic=4.5e-10, longest=5e-8, context=5e-8
            ),
        )  # fmt: skip
    minimax = load_yaml(preset("latency", "minimax-m2.5-h200-tp4"), Latency)
    slower = {"minimax": {}, "slow": {"context": 60e-9, "decode": 1e-4}, "contexts": {"context": 40e-9}}
    return minimax.with_coefficients(slower[name])


def attained(cell: Cell, rate: float, seed: int, args: argparse.Namespace) -> float:
    times = latency(cell.latency)
    mesh = Mesh(2, times.tensor_parallel, None, colocated=cell.colocated)
    more = {name: vars(args)[name] for name in ("perf", "prediction_error", "noise") if name in args}
    options = Options(routing=args.routing, boundary="layer", kv_scale=cell.kv_scale, **more)
    report = simulate(
        cell.source(args.traces), args.policy, mesh, times, seed, qps=rate, num_requests=cell.requests, options=options
    )
    return float(report.summary.attained)


def seeds(name: str, args: argparse.Namespace) -> range:
    """Return the seeds of a cell: a trace is one load, unless step times vary."""
    return range(1 if name in TRACES and not getattr(args, "noise", None) else args.seeds)


def row(name: str, rate: float, runs: dict[str, float], before: dict[str, float]) -> list[Any]:
    """Return the mean over seeds, the mean of the seeds that both results have, and the difference in points."""
    keys = [key for key in runs if key.startswith(f"{name}@{rate:g} ")]
    both = [key for key in keys if key in before]
    mine, theirs = mean(runs[key] for key in keys), mean(before[key] for key in both) if both else None
    gain = mean(100 * (runs[key] - before[key]) for key in both) if both else None
    return [name, f"{rate:g}", len(keys), f"{mine:.3f}", theirs and f"{theirs:.3f}", gain and f"{gain:+.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="unified", help="[%(default)s]")
    parser.add_argument("--routing", default="auto", help="[auto: the policy's own]")
    parser.add_argument("--perf", default=Options().perf, help="form of the predicted step times [%(default)s]")
    parser.add_argument("--prediction-error", type=float, default=0.0, metavar="SHARE", help="of all predictions [0]")
    parser.add_argument("--noise", type=float, metavar="SHARE", help="by which step times vary [none]")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="cells, NAME@RATE, that contain one of these, with commas"
    )
    parser.add_argument("--seeds", type=int, default=3, help="[%(default)s]")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="without it, cells of traces are left out")
    parser.add_argument("--against", type=Path, metavar="FILE", help="another result")
    common.add_output(parser, "cells")
    args = parser.parse_args()
    runs: dict[str, float] = json.loads(args.output.read_text())["runs"] if args.output.is_file() else {}
    before = json.loads(args.against.read_text())["runs"] if args.against else {}
    rows = []
    for name, cell in CELLS.items():
        if name in TRACES and args.traces is None:
            continue
        for rate in cell.rates:
            if not any(text in f"{name}@{rate:g}" for text in args.only.split(",")):
                continue
            for seed in seeds(name, args):
                key = f"{name}@{rate:g} seed {seed}"
                if key not in runs:
                    runs[key] = round(attained(cell, rate, seed, args), 4)
                    print(f"{key}: {runs[key]:.3f}", flush=True)
                    common.save(args, {"runs": runs}, quiet=True)
            rows.append(row(name, rate, runs, before))
    print_table("", ["cell", "per s", "seeds", "attained", "before", "points"], rows)


if __name__ == "__main__":
    main()
