"""Measure the attainment that the engine's learned step-time model costs, compared with the true model.

    python benchmarks/learned_predictor.py                            # eleven workloads, five policies (slow)
    python benchmarks/learned_predictor.py --workload K128 --padded   # on devices that pad steps to compiled sizes

For each workload and policy: the rate at which the policy attains 90 % with the true model, and the attainment with
both models at that rate, as means over seeds. Without noise in the step times, the learned model equals the true one
after its first profile. Results that are already in the output file are not computed again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from typing import Any, NamedTuple

from common import add_output, save
from unified import SYSTEMS, workload

from jaxserve.config import load_yaml, preset
from jaxserve.report import progress
from jaxserve.report.table import print_table
from jaxserve.sched.perf.buckets import NONE, Buckets
from jaxserve.sched.sim import Mesh
from jaxserve.sched.sim.latency import Latency
from jaxserve.sched.sim.options import Options
from jaxserve.sched.sim.simulate import simulate
from jaxserve.sched.sim.sweep import goodput_search

WORKLOADS = (
    "K128", "K128 beta=40ns", "K100", "K32", "mooncake-conversation", "mooncake-arxiv", "azure-conversation",
    "azure-code", "flowprefill-llama3-70b", "slos-serve-mixed", "slos-serve-reasoning",
)  # fmt: skip
POLICIES = ("unified", "flowprefill", "kairos", "slos_serve", "fairbatching")
ENGINE = Buckets((1, 4, 8, 16, 32, 64, 128, 256), (64, 128, 512, 2048, 8192))  # coarser than an engine's


class Case(NamedTuple):
    """One row of the table."""

    workload: str
    policy: str
    requests: int
    seeds: int
    noise: float
    padded: bool


def run(case: Case) -> tuple[Case, float, Mapping[str, float]]:
    """Return the case, its rate in requests/s, and the attained share by step-time model."""
    load, coefficients, others = workload(case.workload, case.requests)
    latency = load_yaml(preset("latency", "minimax-m2.5-h200-tp4"), Latency)
    if coefficients:
        latency = latency.with_coefficients(coefficients)
    latency = replace(latency, buckets=ENGINE if case.padded else NONE)
    system = SYSTEMS[case.policy]
    mesh = replace(Mesh.parse("2x4"), colocated=system.colocated)
    options = Options(**{"routing": system.routing, "boundary": system.boundary, "noise": case.noise, **others})
    found = goodput_search(
        load, [system.policy], mesh, latency, seeds=range(1), num_requests=case.requests, options=options, goal=0.9,
        tolerance=0.03, start=4.0,
    )  # fmt: skip
    (best,) = found.values()
    attained = {}
    for perf in ("general", "learned"):
        shares = [
            simulate(
                load, system.policy, mesh, latency, seed, qps=best.rate, num_requests=case.requests,
                options=replace(options, perf=perf),
            ).summary.attained
            for seed in range(case.seeds)
        ]  # fmt: skip
        attained[perf] = sum(shares) / len(shares)
    return case, best.rate, attained


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workload",
        action="append",
        choices=WORKLOADS,
        metavar="NAME",
        help="may be repeated: " + ", ".join(WORKLOADS),
    )
    parser.add_argument("--policy", action="append", choices=POLICIES, help="may be repeated")
    parser.add_argument("--requests", type=int, default=400, metavar="N")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--noise", type=float, default=0.1, metavar="S", help="relative noise of step times [0.1]")
    parser.add_argument("--padded", action="store_true", help="pad steps to an engine's compiled sizes")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    add_output(parser, "learned_predictor")
    args = parser.parse_args()
    todo = [
        Case(name, policy, args.requests, args.seeds, args.noise, args.padded)
        for name in args.workload or WORKLOADS
        for policy in args.policy or POLICIES
    ]
    done: dict[str, dict[str, Any]] = {}
    if args.output.exists():
        done = {_key(one["workload"], one["policy"]): one for one in json.loads(args.output.read_text())["results"]}
    left = [case for case in todo if _key(case.workload, case.policy) not in done]
    with ProcessPoolExecutor(args.jobs) as pool, progress.bar("simulating") as tick:
        for count, future in enumerate(as_completed([pool.submit(run, case) for case in left]), 1):
            case, rate, attained = future.result()
            found = {"workload": case.workload, "policy": case.policy, "rate": rate, **attained}
            done[_key(case.workload, case.policy)] = found
            tick(count, len(left), f"{case.workload} {case.policy}")
            save(args, {"results": [done[key] for key in map(_of, todo) if key in done]}, quiet=True)
    rows: list[Sequence[object]] = []
    for one in (done[key] for key in map(_of, todo)):
        shares = (one["general"], one["learned"], one["learned"] - one["general"])
        rows.append((one["workload"], one["policy"], f"{one['rate']:.2f}", *(f"{100 * share:.1f}" for share in shares)))
    title = f"attained, %, at the rate where the true form attains 90 %; noise {args.noise:g}"
    print_table(title, ["workload", "policy", "requests/s", "true form", "learned", "difference"], rows)
    print(f"largest difference {max(abs(one['learned'] - one['general']) for one in done.values()):.1%}")
    return 0


def _of(case: Case) -> str:
    return _key(case.workload, case.policy)


def _key(workload: str, policy: str) -> str:
    return f"{workload} | {policy}"


if __name__ == "__main__":
    sys.exit(main())
