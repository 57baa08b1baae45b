"""Measure the CPU seconds of one simulation by policy, on one prefill and one decode instance and on two mixed ones.

    python benchmarks/simulation_cost.py                    # 1,000 requests of K128 at 3 requests/s: a table, JSON

CPU time of this process, so that other load on the machine matters only through shared caches. Includes lazy imports
and drawing the workload.
"""

from __future__ import annotations

import argparse
import time

import common

from jaxserve.config import load_yaml, preset
from jaxserve.report import progress
from jaxserve.report.table import print_table
from jaxserve.sched import policies
from jaxserve.sched.sim import NAMED, Latency, Mesh, Options, simulate

MESHES = {"1P1D": Mesh(2, 4), "2 mixed": Mesh(2, 4, colocated=True)}


def run(policy: str, mesh: str, args: argparse.Namespace) -> dict[str, object]:
    latency = load_yaml(preset("latency", "minimax-m2.5-h200-tp4"), Latency)
    began = time.process_time()
    report = simulate(
        NAMED[args.workload],
        policy,
        MESHES[mesh],
        latency,
        qps=args.qps,
        num_requests=args.requests,
        options=Options(routing=args.routing),
    )
    spent = time.process_time() - began
    steps = report.counters.steps
    row = {"policy": policy, "mesh": mesh, "steps": steps, "attained": report.summary.attained}
    return row | {"cpu_s": spent, "cpu_ms_per_step": 1e3 * spent / max(1, steps)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="K128", choices=sorted(NAMED), metavar="NAME", help="[K128]")
    parser.add_argument("--policies", nargs="+", default=policies.names(), metavar="NAME", help="[all]")
    parser.add_argument("--routing", default="auto", metavar="NAME", help="[auto: the policy's own]")
    parser.add_argument("--qps", type=float, default=3.0, metavar="RATE", help="requests/s [3]")
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="[1000]")
    common.add_output(parser, "simulation_cost")
    args = parser.parse_args()
    cases = [(policy, mesh) for mesh in MESHES for policy in args.policies]
    rows: list[dict[str, object]] = []
    with progress.bar("simulating") as tick:
        for policy, mesh in cases:
            rows.append(run(policy, mesh, args))
            tick(len(rows), len(cases))
    titles = ["policy", "mesh", "steps", "attained", "CPU s", "CPU ms per step"]
    print_table(
        f"{args.requests} requests of {args.workload} at {args.qps:g}/s", titles, [[*row.values()] for row in rows]
    )
    common.save(args, {"rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
