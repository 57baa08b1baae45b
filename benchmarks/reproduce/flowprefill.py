"""FlowPrefill's tables in the simulator: goodput, SLO scale, orders, batching, chunk sweep.

Prompts alone, as the paper counts TTFT alone: every request ends with its first token. Each table takes one
or two minutes on two cores; name those to see.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # measure this checkout, installed or not

import choose

from jaxserve.config import load_yaml, preset
from jaxserve.report.table import print_table
from jaxserve.sched.metrics import GOAL, Summary
from jaxserve.sched.sim import Arrival, Latency, Options, Report, goodput_search, simulate
from jaxserve.sched.sim.scenarios import flowprefill

MODEL = "llama3-8b"
LATENCY = load_yaml(preset("latency", "llama3-8b-a800"), Latency)
WHOLE = 65536  # tokens: no prompt of the mix is longer
REQUESTS, SEEDS, TOLERANCE = 800, (0, 1), 0.04


@dataclass(frozen=True)
class Prompts:
    """The task mix, each request with one output token."""

    scale: float = 1.0
    name: str = "flowprefill, prompts alone"

    def draw(self, count: int, rate: float, seed: int) -> list[Arrival]:
        drawn = flowprefill(MODEL, self.scale).draw(count, rate, seed)
        return [replace(arrival, output_tokens=1) for arrival in drawn]


@dataclass(frozen=True)
class System:
    """A row of a table: a policy, and the instances it runs on."""

    label: str
    policy: str
    options: dict[str, Any] = field(default_factory=dict)

    def settings(self) -> Options:
        given = {"tokens": WHOLE, "boundary": "op", "suspended": 64, "perf": "poly", **self.options}
        return Options(**given)

    def run(self, rate: float, scale: float = 1.0, **more: Any) -> list[Report]:
        return [
            simulate(
                Prompts(scale), self.policy, "2x1", LATENCY, seed, qps=rate, num_requests=REQUESTS,
                options=self.settings(), **more,
            )
            for seed in SEEDS
        ]  # fmt: skip

    def attained(self, rate: float, scale: float = 1.0) -> float:
        return fmean(ttft(report.summary) for report in self.run(rate, scale))

    def goodput(self) -> float:
        found = goodput_search(
            Prompts(), [self.policy], "2x1", LATENCY, seeds=SEEDS, num_requests=REQUESTS, options=self.settings(),
            value=ttft, tolerance=TOLERANCE, start=2.0,
        )  # fmt: skip
        return found[self.policy].rate

    def tightest(self, rate: float) -> float:
        """The least SLO scale at which the goal is reached."""
        low, high = 0.125, 0.25
        while self.attained(rate, high) < GOAL:
            low, high = high, 2 * high
        while high > low * (1 + TOLERANCE):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if self.attained(rate, middle) >= GOAL else (middle, high)
        return high


def ttft(summary: Summary) -> float:
    return summary.ttft_attained


CHUNK = {"boundary": "chunk"}
FLOW = System("FlowPrefill", "flowprefill")
SYSTEMS = (
    FLOW,
    System("FlowPrefill, to the letter", "flowprefill:literal"),
    System("DistServe", "distserve", {"prompts": 1, **CHUNK}),
    System("DistServe-CP2K (EDF)", "edf", {"tokens": 2048, **CHUNK}),
    System("DistServe-CP8K (EDF)", "edf", {"tokens": 8192, **CHUNK}),
    System("EDF, 2K, one prompt a chunk", "edf:no-pack", {"tokens": 2048, **CHUNK}),
    System("S-EDF, 2K, one prompt a chunk", "sedf:no-pack", {"tokens": 2048, **CHUNK}),
)


Row = Sequence[object]


def parallel(make: Callable[[Any], Row], of: Sequence[Any]) -> list[Row]:
    """A row for each, by a process per core."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(make, of))


def goodput() -> None:
    """Figure 9, first row: the highest rate at which 90 % attain their TTFT, and attainment at some rates."""
    rows = parallel(_goodput, SYSTEMS)
    best = float(str(rows[0][1]))
    titles = ["system", "goodput, req/s", "1 req/s, %", "2", "4", "6", "FlowPrefill is x times"]
    print_table("Goodput (Figure 9, first row)", titles, [[*row, f"{best / float(str(row[1])):.1f}"] for row in rows])


def _goodput(system: System) -> Row:
    return [system.label, f"{system.goodput():.2f}", *percent(system, 1, 2, 4, 6)]


def percent(system: System, *rates: float) -> list[str]:
    return [f"{100 * system.attained(rate):.1f}" for rate in rates]


def scale() -> None:
    """Figure 9, second row: the tightest multiple of all TTFTs that 90 % attain, at 2 and at 4 requests/s."""
    titles = ["system", "at 2 req/s", "at 4 req/s"]
    print_table("Tightest SLO scale (Figure 9, second row)", titles, parallel(_scale, SYSTEMS))


def _scale(system: System) -> Row:
    return [system.label, *(f"{system.tightest(rate):.2f}" for rate in (2.0, 4.0))]


def orders() -> None:
    """Figure 10: S-EDF, D-EDF and EDF as FlowPrefill's priority."""
    named = (("S-EDF", "sedf"), ("D-EDF", "deadline_edf"), ("EDF", "edf"))
    titles = ["order", "goodput, req/s", "SLO scale at 5 req/s", "5 req/s, %", "6", "7", "8"]
    systems = [System(label, f"flowprefill:order={name}") for label, name in named]
    print_table("Orders (Figure 10)", titles, parallel(_order, systems))


def _order(system: System) -> Row:
    return [system.label, f"{system.goodput():.2f}", f"{system.tightest(5.0):.2f}", *percent(system, 5, 6, 7, 8)]


def batching() -> None:
    """Figure 11: attainment and throughput by batch token budget, up to far beyond what the instance can do."""
    systems = [System("no batching", "flowprefill:batch=0")]
    for budget in (512, 1024, 2048, 4096, 8192):
        systems.append(System(f"{budget}", f"flowprefill:batch={budget}"))
        systems.append(System(f"{budget}, to the letter", f"flowprefill:batch={budget}+literal"))
    titles = ["batch budget G", "goodput", "6 req/s: % / req/s", "8", "12"]
    print_table("Batching (Figure 11)", titles, parallel(_batching, systems))


def _batching(system: System) -> Row:
    cells = []
    for rate in (6.0, 8.0, 12.0):
        reports = system.run(rate)
        share = 100 * fmean(ttft(report.summary) for report in reports)
        cells.append(f"{share:.1f} / {fmean(report.summary.request_throughput for report in reports):.2f}")
    return [system.label, f"{system.goodput():.2f}", *cells]


def chunks() -> None:
    """Figure 15: FlowPrefill with chunked prompts."""
    sizes = (1024, 2048, 4096, 8192, 16384, WHOLE)
    titles = ["chunk", "goodput, op", "6 req/s, op, %", "goodput, chunk", "6 req/s, chunk, %"]
    print_table("Chunked prompts (Figure 15)", titles, parallel(_chunks, sizes))


def _chunks(tokens: int) -> Row:
    cells: list[object] = ["none" if tokens == WHOLE else tokens]
    for boundary in ("op", "chunk"):
        system = System("", "flowprefill", {"tokens": tokens, "boundary": boundary})
        cells += [f"{system.goodput():.2f}", *percent(system, 6.0)]
    return cells


if __name__ == "__main__":
    raise SystemExit(choose.run(__doc__, (goodput, scale, orders, batching, chunks)))
