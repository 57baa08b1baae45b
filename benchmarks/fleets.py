#!/usr/bin/env python3
"""Simulated fleets of 8 to 512 replicas, routed by fronts with outdated state: goodput per replica.

Every replica is one mixed instance. The load per replica, its duration and the delay from arrival to replica are the
same for all sizes. Small fleets are simulated with more seeds, so that each figure counts about as many requests.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import common

from jaxserve.config import preset
from jaxserve.report.table import print_table
from jaxserve.sched.routing import ROUTERS
from jaxserve.sched.sim.latency import Latency
from jaxserve.sched.sim.options import Mesh, Options
from jaxserve.sched.sim.scenarios import NAMED
from jaxserve.sched.sim.simulate import simulate
from jaxserve.sched.sim.workload import Workload
from jaxserve.yamlio import load_yaml

MODEL = "qwen3-14b-h20"
WORKLOAD = "fairbatching-azure"
DELAY = 0.005  # seconds from arrival to replica


class Row(NamedTuple):
    """One router on fleets of one size."""

    router: str
    replicas: int
    fronts: int
    stale_ms: float
    requests: int
    attained: float
    goodput: float  # requests per second and replica that met their objectives
    ttft_p99: float
    seconds: float  # of the simulations


def measure(args: argparse.Namespace, router: str, replicas: int, fronts: int, stale: float) -> Row:
    began, seeds = time.perf_counter(), max(1, args.least // (replicas * args.requests))
    latency = load_yaml(preset("latency", MODEL), Latency)
    workload = NAMED[WORKLOAD]
    assert isinstance(workload, Workload)
    workload = replace(workload, ttft=args.ttft, tpot=args.tpot)
    options = Options(routing=router, stale=stale / 1e3, routing_delay=DELAY, fronts=fronts, noise=0.013)
    mesh = Mesh(replicas, latency.tensor_parallel, colocated=True)
    found = [
        simulate(
            workload, "unified", mesh, latency, seed, qps=args.rate * replicas,
            num_requests=args.requests * replicas, options=options,
        )
        for seed in range(seeds)
    ]  # fmt: skip
    count = sum(one.summary.count for one in found)
    attained = sum(one.summary.attained * one.summary.count for one in found) / count
    late = sorted(request.ttft for one in found for request in one.measured)[int(0.99 * count)]
    return Row(
        router, replicas, fronts, stale, count, attained, attained * args.rate, late, time.perf_counter() - began
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--routers", nargs="+", default=sorted(ROUTERS))
    parser.add_argument("--replicas", nargs="+", type=int, default=[8, 64, 512])
    parser.add_argument("--stale", nargs="+", type=float, default=[0.0, 50.0, 200.0, 500.0], metavar="MS")
    parser.add_argument("--fronts", nargs="+", type=int, default=[1], help="processes that do not see each other")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second and replica")
    parser.add_argument("--requests", type=int, default=8, help="per replica")
    parser.add_argument("--least", type=int, default=4096, help="requests for each figure, by more seeds")
    parser.add_argument("--ttft", type=float, default=0.5, help="seconds")
    parser.add_argument("--tpot", type=float, default=0.05, help="seconds")
    common.add_output(parser, "fleets")
    args = parser.parse_args()
    rows: list[Row] = []
    known = {"workload": WORKLOAD, "model": MODEL, "delay": DELAY}
    for fronts, router, stale, replicas in product(args.fronts, args.routers, args.stale, args.replicas):
        rows.append(measure(args, router, replicas, fronts, stale))
        print(*rows[-1], flush=True)
        common.save(args, {**known, "rows": [row._asdict() for row in rows]}, quiet=True)
    heads = ["router", "fronts", "state, ms", *(f"{count}" for count in args.replicas), "change"]
    table = []
    for router, fronts, stale in dict.fromkeys((row.router, row.fronts, row.stale_ms) for row in rows):
        goodput = [row.goodput for row in rows if (row.router, row.fronts, row.stale_ms) == (router, fronts, stale)]
        change = f"{100 * (goodput[-1] / goodput[0] - 1):+.1f} %"
        table.append([router, str(fronts), f"{stale:g}", *(f"{one:.3f}" for one in goodput), change])
    print_table(f"goodput per replica, of {args.rate:g} requests/s, by number of replicas", heads, table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
