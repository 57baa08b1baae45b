"""Reproduce FlowPrefill's preemption in the simulator: blocking time (Figure 12), prompts beside decodes (Figure 16).

Steps are cut and dispatched as in the engine (sched/api/preemption.py), unless a row says otherwise. In Figure 12 every
request ends with its first token, as in flowprefill.py. Figure 16 uses the colocated workload on one mixed instance:
three times the TTFT, and a TBT of 100 ms for text and images, 200 ms for searches and files (section 6.5).

    python benchmarks/reproduce/flowprefill_stops.py             # both tables, and JSON
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import add_output, save
from flowprefill_systems import LLAMA_8B, WHOLE, Prompts, System, ttft

from jaxserve.report.table import print_table
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.sim import Arrival, Options, Report, simulate
from jaxserve.sched.sim.scenarios import flowprefill

RATE = 5.0  # requests/s of Figure 12
RATES = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)  # of Figure 16
LATENCY = LLAMA_8B.latency
COLOCATED = flowprefill(LLAMA_8B.model, colocated=True)
VARIED, NOISE = 4.0, (0.05, 0.15)  # requests/s; standard deviation of a step's factor
REQUESTS, SEEDS = 300, (0, 1)
LONG = 131_072  # tokens
CUTS: Mapping[str, dict[str, Any]] = {
    "5 operators a layer, no lead (the paper's)": {
        "boundary": "op", "segments": LATENCY.layers * LATENCY.operators, "lead": 0.0, "tokens": WHOLE
    },
    **{boundary: {"boundary": boundary} for boundary in ("op", "layer")},
    **{f"{boundary}, within 10 ms": {"boundary": boundary, "stop_within": 0.01} for boundary in ("op", "layer")},
}  # fmt: skip


class Stopwatch:
    """Seconds from each request to stop a step until it has stopped. Writer: the log of an instance."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._asked = 0.0

    def __call__(self, name: str, *_: object) -> Callable[..., None]:
        def log(kind: str, **fields: Any) -> None:
            if kind == "interrupts":
                self._asked = fields["now"]
            elif kind == "suspend":
                self.seconds.append(fields["result"].at - self._asked)

        return log


def _blocked() -> Iterator[System]:
    """Yield the rows of Figure 12."""
    operators = {"boundary": "op", "segments": LATENCY.layers * LATENCY.operators, "lead": 0.0}
    yield System(f"{LATENCY.operators} operators a layer, no lead (the paper's)", "flowprefill", operators)
    for boundary in ("op", "layer"):
        yield System(f"{boundary}, no lead", "flowprefill", {"boundary": boundary, "lead": 0.0})
    for boundary in ("op", "layer", "layers:4", "chunk"):
        yield System(boundary, "flowprefill", {"boundary": boundary})
    for boundary in ("op", "layer"):
        yield System(f"{boundary}, within 10 ms", "flowprefill", {"boundary": boundary, "stop_within": 0.01})
    for tokens in (8192, 2048):
        for boundary in ("op", "layer", "chunk"):
            options = {"boundary": boundary, "tokens": tokens}
            yield System(f"{boundary}, chunks of {tokens:,}", "flowprefill", options)


def blocking() -> list[dict[str, Any]]:
    """Make Figure 12: time until a step stops, and its effect on attainment and goodput."""
    rows = []
    for system in _blocked():
        watch = Stopwatch()
        share = fmean(ttft(report.summary) for report in system.run(RATE, logs=watch))
        ms = [1e3 * one for one in watch.seconds]
        row = {
            "boundary": system.label,
            "stops": len(ms),
            "mean_ms": fmean(ms) if ms else None,
            "largest_ms": max(ms, default=None),
            "attained": share,
            "goodput": system.goodput(),
        }
        rows.append(row)
        print(row, flush=True)
    columns = ["boundary", "stops", "mean_ms", "largest_ms", "attained", "goodput"]
    print_table(f"Blocking time at {RATE} requests/s (Figure 12)", columns, [[row[c] for c in columns] for row in rows])
    return rows


def behind() -> list[dict[str, Any]]:
    """Measure how long stops take that a prompt of 128K tokens must make for short ones."""
    first = Arrival(0.0, LONG, 1, SLO(ttft=300.0, tpot=1.0))
    rows = []
    for label, options in CUTS.items():
        watch, kept = Stopwatch(), []
        for seed in SEEDS:
            short = [replace(one, time=one.time + 0.1) for one in Prompts().draw(100, 2.0, seed)]
            report = simulate(
                [first, *(one for one in short if one.prompt_tokens < 4096)], "flowprefill", "1x1", LATENCY, seed,
                options=Options(**{"perf": "poly", "pages": 1 << 16, **options}), logs=watch,
            )  # fmt: skip
            kept += [one.ttft_attained for one in report.measured[1:]]
        p50, p99 = (1e3 * float(one) for one in np.percentile(watch.seconds, [50, 99]))
        rows.append({"cut": label, "stops": len(watch.seconds), "p50_ms": p50, "p99_ms": p99, "attained": fmean(kept)})
    print_table(f"Waits of stops behind a prompt of {LONG:,} tokens", [*rows[0]], [[*row.values()] for row in rows])
    return rows


@dataclass(frozen=True)
class Mixed:
    """A row of Figure 16: a policy on one mixed instance."""

    label: str
    policy: str
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, rate: float, seed: int) -> Report:
        options = Options(**{"perf": "poly", "boundary": "op", **self.options})
        return simulate(COLOCATED, self.policy, "1x1", LATENCY, seed, qps=rate, num_requests=REQUESTS, options=options)


MIXED = (
    Mixed("FlowPrefill, op", "flowprefill"),
    Mixed("FlowPrefill, layer", "flowprefill", {"boundary": "layer"}),
    Mixed("FlowPrefill, op, whole prompts", "flowprefill", {"tokens": WHOLE}),
    Mixed("FlowPrefill's order, no stops", "flowprefill:no-preempt", {"boundary": "chunk"}),
    Mixed("vLLM-CP2K", "sarathi:tokens=2048", {"boundary": "chunk"}),
    Mixed("vLLM-CP2K, prompts first", "vllm:tokens=2048", {"boundary": "chunk", "tokens": 2048}),
)


def colocated() -> list[dict[str, Any]]:
    """Make Figure 16: shares of requests that attain their TTFT and their TBT, by rate."""
    rows = [_colocated(system, rate) for system in MIXED for rate in RATES]
    for what, title in (("ttft", "TTFT"), ("tbt", "TBT")):
        table = [
            [system.label, *(f"{100 * row[what]:.1f}" for row in rows if row["system"] == system.label)]
            for system in MIXED
        ]
        print_table(f"{title} attained by requests/s, % (Figure 16)", ["system", *map(str, RATES)], table)
    return rows


def _colocated(system: Mixed, rate: float) -> dict[str, Any]:
    reports = [system.run(rate, seed) for seed in SEEDS]
    row = {
        "system": system.label,
        "rate": rate,
        "ttft": fmean(report.summary.ttft_attained for report in reports),
        "tbt": fmean(
            report.summary.tpot_attained for report in reports
        ),  # the TPOT objective equals the TBT, so the TBT decides
        "both": fmean(report.summary.attained for report in reports),
        "stops": sum(report.counters.suspended for report in reports),
        "blocking_s": sum(report.counters.blocking for report in reports),
    }
    print(row, flush=True)
    return row


def varying() -> list[dict[str, Any]]:
    """Make Figure 16 at one rate with unpredictable step times: lognormal factors of mean 1."""
    rows = [
        {"noise": noise, **_colocated(replace(system, options={**system.options, "noise": noise}), VARIED)}
        for system in MIXED
        for noise in NOISE
    ]
    table = [
        [
            system.label,
            *(f"{100 * row['ttft']:.1f} / {100 * row['tbt']:.1f}" for row in rows if row["system"] == system.label),
        ]
        for system in MIXED
    ]
    print_table(f"TTFT / TBT attained at {VARIED} requests/s by noise, %", ["system", *map(str, NOISE)], table)
    return rows


Maker = Callable[[], list[dict[str, Any]]]
TABLES: Mapping[str, Maker] = {"blocking": blocking, "behind": behind, "colocated": colocated, "varying": varying}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(TABLES)} [all]")
    add_output(parser, "flowprefill_stops")
    args = parser.parse_args()
    unknown = [name for name in args.tables if name not in (*TABLES, "all")]
    if unknown:
        parser.error(f"unknown table {unknown[0]!r}; choose from {', '.join(TABLES)}")
    chosen = TABLES if not args.tables or "all" in args.tables else args.tables
    save(args, {name: TABLES[name]() for name in chosen})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
