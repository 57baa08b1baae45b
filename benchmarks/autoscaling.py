"""Compare rules for the number of replicas on production traces, in virtual time: attainment and replica hours.

    python benchmarks/autoscaling.py            # a table and JSON; needs the traces

`budget` scales on prefill admission budgets (sched/scaling/budget.py), `requests` on the number of unfinished requests
per replica, as Ray Serve, KEDA and Knative do. Both get the same starts, periods and holds, and several targets,
because a rule may buy attainment with replicas: compare hours at equal attainment. `fixed` keeps a number of replicas.
A trace is replayed in its own time. Every request is sent `copies` times, each within a few seconds of its time, for a
load that needs several replicas.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import add_output, save

from jaxserve.config import load_yaml, preset
from jaxserve.report import progress
from jaxserve.report.table import print_table
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.sim import Arrival, simulate
from jaxserve.sched.sim.latency import Latency
from jaxserve.sched.sim.options import Mesh, Options, Scaling
from jaxserve.sched.sim.traces import load_trace

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
PRESET = "llama3-8b-a800"
OBJECTIVES = SLO(ttft=2.0, tpot=0.1)
JITTER = 5.0  # seconds within which the copies of a request arrive


@dataclass(frozen=True)
class Trace:
    """A part of a trace, in seconds, and how often each request is sent."""

    file: str
    start: float
    duration: float
    copies: int


LOADS = {
    "Azure conversation": Trace("azure/AzureLLMInferenceTrace_conv.head40min.csv.gz", 0, 900, 3),
    "Azure code": Trace("azure/AzureLLMInferenceTrace_code.head38min.csv", 0, 1200, 2),
    "BurstGPT": Trace("burstgpt/BurstGPT_1.days0-4.csv.gz", 213_600, 3000, 40),
}
RULES = (
    *(f"budget:target={target}" for target in (0.3, 0.5, 0.8)),
    *(f"requests:target={target}" for target in (4, 8, 16, 32, 64, 96)),
)


def arrivals(trace: Trace, seed: int) -> list[Arrival]:
    """Return the requests of a trace, each `copies` times, in order."""
    once = load_trace(
        TRACES / trace.file, slo=OBJECTIVES, start=trace.start, duration=trace.duration, spread=1.0, seed=seed
    )
    draw = random.Random(seed)
    every = [
        replace(one, time=one.time + (draw.uniform(0.0, JITTER) if copy else 0.0), key=f"{one.key}-{copy}")
        for one in once
        for copy in range(trace.copies)
    ]
    return sorted(every, key=lambda one: one.time)


def measured(load: Sequence[Arrival], rule: str, args: argparse.Namespace, latency: Latency) -> dict[str, Any]:
    """Return attainment, replica hours and the mean number of replicas under a rule, or a fixed number."""
    fixed = int(rule.partition("=")[2]) if rule.startswith("fixed") else None
    mesh = Mesh(fixed or args.most, colocated=True)
    scaling = None if fixed else Scaling(rule, begin=args.begin, startup=args.startup, hold=args.hold)
    report = simulate(load, args.policy, mesh, latency, options=Options(scaling=scaling))
    return {
        "rule": rule,
        "attained": report.summary.attained,
        "ttft_p99": report.summary.ttft.p99,
        "tpot_p99": report.summary.tpot.p99,
        "replica_hours": report.replica_seconds / 3600,
        "mean_replicas": report.replica_seconds / report.ended,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS), help="traces [all]")
    parser.add_argument("--rules", nargs="+", default=list(RULES), help="scalers with their targets [several]")
    parser.add_argument("--policy", default="unified", help="scheduling policy [%(default)s]")
    parser.add_argument("--most", type=int, default=16, help="most replicas [%(default)s]")
    parser.add_argument("--begin", type=int, default=3, help="replicas at the start [%(default)s]")
    parser.add_argument("--fixed", type=int, nargs="*", default=[], help="also fixed numbers of replicas")
    parser.add_argument("--startup", type=float, default=60.0, help="seconds to start a replica [%(default)s]")
    parser.add_argument("--hold", type=float, default=120.0, help="seconds before the number falls [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of the copies' times [%(default)s]")
    add_output(parser, "autoscaling")
    args = parser.parse_args()
    latency, table, found = load_yaml(preset("latency", PRESET), Latency), [], {}
    rules = [*args.rules, *(f"fixed={count}" for count in args.fixed)]
    with progress.bar("simulating") as bar:
        for name in args.loads:
            load = arrivals(LOADS[name], args.seed)
            found[name] = rows = []
            for rule in rules:
                rows.append(measured(load, rule, args, latency))
                bar(len(table) + 1, len(args.loads) * len(rules))
                table.append((name, rule, *(rows[-1][key] for key in ("attained", "replica_hours", "mean_replicas"))))
    heads = ("trace", "rule", "attained", "replica hours", "mean replicas")
    rows_ = [(*row[:2], f"{row[2]:.3f}", f"{row[3]:.2f}", f"{row[4]:.1f}") for row in table]
    print_table(f"{args.policy}, {PRESET}, TTFT 2 s, TPOT 100 ms", heads, rows_)
    save(args, {"loads": found})


if __name__ == "__main__":
    main()
