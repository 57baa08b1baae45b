"""Measure how long prompts wait beside running decodes on one mixed instance that serves.

    python benchmarks/colocated.py            # the demo model on --mesh 1x1: a table and JSON

FlowPrefill's colocated setting (section 6.5) at the size of the demo model. Let t be the time that a long prompt takes
alone. A few requests decode throughout. Long prompts arrive at a fixed interval with a TTFT objective of `--long-slo`
times t; short prompts arrive as a Poisson process with an objective of t / 2. Every TPOT objective is t / 4, so a step
that computes a whole long prompt violates the objectives of all running decodes. Each of `--rounds` rounds runs every
system, and measures step times and t before each run.

Wait: from the arrival of a short prompt to the start of its first step. Blocking: from the request to stop a step until
the step has stopped. Gap: time between two tokens of a running decode.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from common import add_output, clustered, save, submit

from jaxserve.config import ServeConfig
from jaxserve.engine.startup.assemble import Machine, assemble
from jaxserve.report.table import print_table
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.sched.instance.stats import Counters
from jaxserve.sched.sim import Arrival

LENGTH, CHUNK, ROWS = 2048, 2048, 16
TALK, SHORT, LONG = (32, 1800), (48, 4), (1800, 2)  # tokens of prompt and output


@dataclass(frozen=True)
class System:
    """A policy and the boundary at which its steps can be stopped."""

    policy: str
    boundary: str = "chunk"


SYSTEMS = {
    "flowprefill, op": System("flowprefill", "op"),
    "flowprefill, layer": System("flowprefill", "layer"),
    "flowprefill, no stops": System("flowprefill:no-preempt"),
    "chunks of 512": System("sarathi:tokens=512"),
    "chunks of 2,048": System("sarathi:tokens=2048"),
}


@dataclass
class Run:
    """One served run."""

    requests: list[Request]
    classes: list[str]
    counters: Counters

    def of(self, name: str) -> list[Request]:
        return [one for one in self.requests if self.classes[one.id] == name]


def machines(systems: Sequence[System]) -> dict[str, Machine]:
    """Return one warm machine per boundary, shared by all systems with that boundary."""
    made: dict[str, Machine] = {}
    for boundary in dict.fromkeys(one.boundary for one in systems):
        config = ServeConfig(
            mesh="1x1", max_model_len=LENGTH, max_num_seqs=ROWS, max_num_batched_tokens=CHUNK,
            preempt_boundary=boundary, enable_prefix_caching=False,
        )  # fmt: skip
        made[boundary] = assemble(config, lambda *told: None)
    return made


def serve(base: Machine, system: System, arrivals: Sequence[Arrival]) -> Run:
    """Serve every arrival at its time."""
    return asyncio.run(_serve(base.serving(replace(base.config, policy=system.policy)), arrivals))


async def _serve(machine: Machine, arrivals: Sequence[Arrival]) -> Run:
    over: list[Request] = []
    async with clustered(machine, over) as cluster:
        await submit(cluster, machine.now, arrivals)
        while any(arrivals[id].class_ != "talk" for id in set(range(len(arrivals))) - {one.id for one in over}):
            await asyncio.sleep(0.02)
        for id in set(range(len(arrivals))) - {one.id for one in over}:
            cluster.cancel(id)  # the background decodes are not measured to their end
    return Run(over, [one.class_ for one in arrivals], cluster.cores[0].scheduler.counters)


def alone(base: Machine) -> float:
    """Return the seconds that a long prompt takes alone: the minimum of a few, because the machine may be busy."""
    arrivals = [Arrival(0.0, *LONG, NO_SLO, "long") for _ in range(5)]
    found = serve(base, System("distserve"), arrivals)
    times = [0.0, *(one.token_times[0] - one.arrival for one in found.requests)]
    return min(after - before for before, after in pairwise(sorted(times)))


def mix(taken: float, args: argparse.Namespace, seed: int) -> list[Arrival]:
    """Return running decodes, long prompts at the rate that `--load` sets, and Poisson arrivals of short prompts."""
    draw, end = np.random.default_rng(seed), args.prompts * taken / args.load
    talk, short, long = (SLO(ttft, taken / 4, taken / 4) for ttft in (10 * taken, taken / 2, args.long_slo * taken))
    made = [Arrival(0.01 * n, *TALK, talk, "talk") for n in range(args.decodes)]
    made += [Arrival((n + 0.5) * taken / args.load, *LONG, long, "long") for n in range(args.prompts)]
    at = 0.0
    while (at := at + draw.exponential(taken / args.short)) < end:
        made.append(Arrival(at, *SHORT, short, "short"))
    return sorted(made, key=lambda one: one.time)


def row(taken: float, run: Run) -> dict[str, Any]:
    """Return the figures of a run, with times divided by `taken`, the time of a long prompt alone."""
    shorts, longs, talks = (run.of(name) for name in ("short", "long", "talk"))
    waits = [(one.scheduled_at or one.token_times[0]) - one.arrival for one in shorts]
    gaps = [after - before for one in talks for before, after in pairwise(one.token_times)]
    counters = run.counters

    def attained(requests: Sequence[Request]) -> float:
        return float(np.mean([one.token_times[0] - one.arrival <= one.slo.ttft for one in requests]))

    return {
        "alone_ms": 1e3 * taken,
        "stops": counters.suspended,
        "blocking": counters.blocking / counters.asked / taken if counters.asked else None,
        "wait_p50": float(np.quantile(waits, 0.5)) / taken,
        "wait_p99": float(np.quantile(waits, 0.99)) / taken,
        "short_ttft": attained(shorts),
        "long_ttft": attained(longs),
        "gap_p99": float(np.quantile(gaps, 0.99)) / taken,
        "gap_max": max(gaps) / taken,
        "gaps_kept": float(np.mean([gap <= taken / 4 for gap in gaps])),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decodes", type=int, default=2, help="requests that decode all the time [%(default)s]")
    parser.add_argument("--prompts", type=int, default=12, help="long prompts per run [%(default)s]")
    parser.add_argument(
        "--load", type=float, default=0.4, help="share of the time that long prompts take [%(default)s]"
    )
    parser.add_argument(
        "--short", type=float, default=1.5, help="short prompts per time of a long prompt [%(default)s]"
    )
    parser.add_argument(
        "--long-slo",
        type=float,
        default=6.0,
        help="TTFT objective of long prompts, in times of a long prompt [%(default)s]",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", default=";".join(SYSTEMS), help="systems to run, separated by ;")
    add_output(parser, "colocated")
    args = parser.parse_args()
    names = args.systems.split(";")
    by_boundary = machines([SYSTEMS[name] for name in names])
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(args.rounds):
        for name in names:
            base = by_boundary[SYSTEMS[name].boundary]
            base.measure()  # other load on the machine may have changed its step times
            taken = alone(base)
            rows[name].append(row(taken, serve(base, SYSTEMS[name], mix(taken, args, number))))
            print(number, name, rows[name][-1], flush=True)
    columns = [column for column in rows[names[0]][0] if column != "alone_ms"]
    table = [[name, *(_median([one[column] for one in rows[name]]) for column in columns)] for name in names]
    print_table("medians of rounds; times relative to a long prompt's", ["system", *columns], table)
    save(args, {"rows": rows})
    return 0


def _median(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None


if __name__ == "__main__":
    raise SystemExit(main())
