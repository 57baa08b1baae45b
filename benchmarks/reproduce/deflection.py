"""Reproduce load-aware prefill deflection in the simulator, on two prefill and two decode instances.

As in the paper, TTFT ends when the KV has arrived at the decode instance. `python benchmarks/reproduce/deflection.py
all` writes docs/research/deflection.md and its JSON.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # import this checkout, installed or not

import numpy as np
import page
from page import Table

from jaxserve.config import load_yaml, preset
from jaxserve.sched.api.log import Log
from jaxserve.sched.api.policy import Limits
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.recorded.record import Recorder
from jaxserve.sched.recorded.timeline import decodes, mixed_steps, prompt_lengths
from jaxserve.sched.sim import Latency, Options, Report, simulate
from jaxserve.sched.sim.clock import VirtualLoop
from jaxserve.sched.sim.scenarios import NAMED

LATENCY = load_yaml(preset("latency", "deepseek-v2-lite-a100"), Latency)
RATES = (6.0, 10.0, 14.0, 18.0)
REQUESTS, SEEDS = 400, 1
SYSTEMS = (
    ("distserve", "round_robin"),
    ("distserve", "least_work"),
    ("distserve", "deflect:faster"),
    ("distserve", "deflect:slo"),
    ("distserve", "deflect:dropped"),
    ("unified", "least_work"),
    ("unified", "unified"),
)
TWO = ("deflect:faster", "deflect:slo")


class Case(NamedTuple):
    """One simulation."""

    policy: str
    routing: str
    rate: float
    requests: int
    seed: int = 0
    tokens: int = 8192
    perf: Any = "general"
    noise: float | None = None

    def run(self, recorder: Recorder | None = None) -> Report:
        options = Options(
            routing=self.routing, first_token="decode", tokens=self.tokens, perf=self.perf, noise=self.noise
        )
        return simulate(
            NAMED["deflection"], self.policy, "4x1", LATENCY, self.seed,
            qps=self.rate, num_requests=self.requests, options=options, recorder=recorder,
        )  # fmt: skip


def routers(args: argparse.Namespace) -> Table:
    """Make the table of P95 TTFT and attainment by routing and rate."""
    count, seeds = args.requests or REQUESTS, args.seeds or SEEDS
    cases = [Case(*system, rate, count, seed) for system in SYSTEMS for rate in RATES for seed in range(seeds)]
    found = dict(zip(cases, page.spread(args, _ends, cases), strict=True))

    def mean(system: tuple[str, str], rate: float) -> tuple[float, float]:
        every = [found[Case(*system, rate, count, seed)] for seed in range(seeds)]
        return fmean(one[0] for one in every), 100 * fmean(one[1] for one in every)

    rows: list[list[object]] = []
    for system in SYSTEMS:
        cells = [mean(system, rate) for rate in RATES]
        shown = [f"{late:.1f} s, {share:.1f}" for late, share in cells]
        before = [mean(SYSTEMS[0], rate) for rate in RATES]
        less = [100 * (1 - one[0] / other[0]) for one, other in zip(cells, before, strict=True)]
        more = [100 * (one[1] / other[1] - 1) for one, other in zip(cells, before, strict=True)]
        gains = ["", ""] if system == SYSTEMS[0] else [between(less), between(more)]
        rows.append([", ".join(f"`{one}`" for one in system), *shown, *gains])
    titles = ["policy, routing", *(f"{rate:g} req/s" for rate in RATES), "P95 TTFT less by, %", "attained more by, %"]
    return Table("P95 TTFT, and % attained (TTFT 2 s, TPOT and TBT 100 ms)", titles, rows)


def between(values: list[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}"


def _ends(case: Case) -> tuple[float, float]:
    summary = case.run().summary
    return summary.ttft.p95, summary.attained


def breakdown(args: argparse.Namespace) -> Table:
    """Make the table of the parts of the P95 TTFT: waiting, computing, KV transfer."""
    count = args.requests or REQUESTS
    routers = ("round_robin", "least_work", "deflect:faster")
    cases = [Case("distserve", one, rate, count) for one in routers for rate in (2.0, 4.0, *RATES)]
    titles = ["routing", "req/s", "P95 TTFT, s", "waiting, %", "computing, %", "moving KV, %"]
    return Table("Parts of the P95 TTFT", titles, page.spread(args, _parts, cases))


def _parts(case: Case) -> list[object]:
    recorder = Recorder()
    report = case.run(recorder)
    lengths = prompt_lengths(recorder)
    computed = dict.fromkeys(lengths, 0.0)
    ended = dict.fromkeys(lengths, 0.0)
    for stretch in recorder.stretches:
        for span in stretch.plan.spans:
            if not decodes(span, lengths):
                computed[span.request] += stretch.end - stretch.start
                ended[span.request] = stretch.end
    ordered = sorted((one for one in report.measured if np.isfinite(one.ttft)), key=lambda one: one.ttft)
    near = ordered[int(0.93 * len(ordered)) : int(0.97 * len(ordered)) + 1]
    moved = [max(0.0, one.arrival + one.ttft - ended[one.id]) / one.ttft for one in near]
    busy = [computed[one.id] / one.ttft for one in near]
    parts = 100 * np.array([1 - fmean(moved) - fmean(busy), fmean(busy), fmean(moved)])
    return [f"`{case.routing}`", f"{case.rate:g}", report.summary.ttft.p95, *(f"{one:.1f}" for one in parts)]


def chunk_sweep(args: argparse.Namespace) -> Table:
    """Make the table by the share of the TBT that a mixed step may take, and by the tokens of a step."""
    count = args.requests or REQUESTS
    shares = [Case("distserve", f"{one}+share={share}", 6.0, count) for one in TWO for share in (0.25, 0.5, 0.75, 1.0)]
    sizes = [
        Case("distserve", one, 6.0, count, tokens=tokens) for one in TWO for tokens in (256, 512, 1024, 2048, 4096)
    ]
    titles = ["routing", "tokens per step", "P95 TTFT, s", "TTFT attained, %", "TPOT and TBT, %", "both, %"]
    rows = page.spread(args, _sweep, [*shares, *sizes])
    titles += ["P99 of largest gaps, ms", "mixed steps P50, ms", "their P99", "deflected"]
    return Table("Chunks on decode instances, at 6 requests/s", titles, rows)


def _sweep(case: Case) -> list[object]:
    recorder = Recorder()
    report = case.run(recorder)
    summary = report.summary
    mixed = mixed_steps(recorder)
    shares = (summary.ttft_attained, summary.tpot_attained, summary.attained)
    cells = [f"{100 * one:.1f}" for one in shares]
    gap = 1e3 * summary.largest_gap.p99
    steps = 1e3 * np.percentile(mixed, [50, 99]) if mixed else (np.nan, np.nan)
    return [f"`{case.routing}`", case.tokens, summary.ttft.p95, *cells, gap, *steps, report.deflections]


class Errors(Recorder):
    """A recorder that also keeps the relative errors of predicted steps of decode instances. Writer: as of Recorder."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: dict[str, list[float]] = {"decode": [], "mixed": []}
        self._of: dict[str, Scheduler] = {}

    def attach(self, name: str, scheduler: Scheduler) -> None:
        super().attach(name, scheduler)
        self._of[name] = scheduler

    def instance(self, name: str, limits: Limits, loop: VirtualLoop, then: Log) -> Log:
        usual = super().instance(name, limits, loop, then)
        plans: dict[int, tuple[str, float]] = {}

        def log(kind: str, **fields: Any) -> None:
            usual(kind, **fields)
            if kind == "planned" and name.startswith("decode"):
                lengths = prompt_lengths(self)
                rows = [decodes(span, lengths) for span in fields["plan"].spans]
                if any(rows):
                    kinds = "decode" if all(rows) else "mixed"
                    plans[fields["plan"].step] = kinds, self._of[name].predicted
            elif kind == "settle" and fields["result"].step in plans:
                result = fields["result"]
                found, predicted = plans.pop(result.step)
                took = result.finished - result.started
                self.shares[found].append(abs(predicted - took) / took)

        return log


def predictor(args: argparse.Namespace) -> Table:
    """Make the table of prediction errors of decode instances' steps and of TTFT, by step-time model."""
    count = args.requests or REQUESTS
    systems = [*(("distserve", one) for one in TWO), ("unified", "unified")]
    cases = [
        Case(*system, 6.0, count, perf=perf, noise=0.05)
        for perf in ("general", "learned", "table")
        for system in systems
    ]
    titles = [
        "step-time model",
        "policy, routing",
        "decode steps",
        "mixed steps",
        "TTFT, prefill path",
        "TTFT, decode path",
    ]
    rows = page.spread(args, _predicted, cases)
    return Table("Mean absolute error of predictions, %, at 6 requests/s", [*titles, "both attained"], rows)


def _predicted(case: Case) -> list[object]:
    recorder = Errors()
    report = case.run(recorder)
    steps = [fmean(one) if one else float("nan") for one in recorder.shares.values()]
    paths = [report.ttft_predictions[path].mape for path in ("prefill", "decode")]
    cells = [f"{100 * one:.1f}" for one in (*steps, *paths, report.summary.attained)]
    return [f"`{case.perf}`", f"`{case.policy}`, `{case.routing}`", *cells]


if __name__ == "__main__":
    raise SystemExit(page.run(__doc__, "deflection", (routers, breakdown, chunk_sweep, predictor)))
