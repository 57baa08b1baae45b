"""Reproduce Kairos's figures (arXiv 2605.02329) in the simulator on K128, as published and repaired.

`python benchmarks/reproduce/kairos.py all` writes docs/research/kairos.md and its JSON. In Figure 4 every request ends
with its first token, so that decode instances have no effect.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # import this checkout, installed or not

import numpy as np
import page
from page import Table

from jaxserve.config import load_yaml, preset
from jaxserve.report import plot
from jaxserve.sched.api.perf import Load
from jaxserve.sched.metrics import Summary
from jaxserve.sched.sim import Arrival, Latency, simulate
from jaxserve.sched.sim.workload import K32, K100, K128

LATENCY = load_yaml(preset("latency", "minimax-m2.5-h200-tp4"), Latency)
REQUESTS, SEEDS = 1000, 2
POLICIES = (
    "distserve",
    "kairos:literal",
    "kairos:verbatim",
    "kairos",
    "kairos:ageing=0.1",
    "sjf",
    "sedf",
    "flowprefill",
)


@dataclass(frozen=True)
class Prompts:
    """K128 with one output token per request."""

    name: str = "K128, prompts alone"

    def draw(self, count: int, rate: float, seed: int) -> list[Arrival]:
        return [replace(arrival, output_tokens=1) for arrival in K128.draw(count, rate, seed)]


def lengths(args: argparse.Namespace) -> Table:
    """Make Figure 1a: lengths of requests."""
    rows: list[list[object]] = []
    for workload in (K128, K100, K32):
        drawn = np.array([one.prompt_tokens + one.output_tokens for one in workload.draw(100_000, 1.0, 0)])
        tokens = [int(np.percentile(drawn, share)) for share in (10, 50, 90, 95, 99)]
        above = [100 * float((drawn >= limit).mean()) for limit in (8192, 65536)]
        work = 100 * float(drawn[drawn >= 65536].sum() / drawn.sum())
        rows.append([workload.name, *tokens, int(drawn.max()), *above, work])
    titles = ["workload", "P10", "P50", "P90", "P95", "P99", "longest", "8K and more, %", "64K and more, %"]
    return Table("Lengths of requests, tokens (Figure 1a)", [*titles, "tokens in those, %"], rows)


PUBLISHED = {8192: (11.0, 0.4004), 131072: (40.3, 8.8)}  # ms of a decode step, seconds of a prefill (section 2.2)


def steps(args: argparse.Namespace) -> Table:
    """Make Figure 1b: times of a decode step by context, alone and beside a 128K row, and of the prefill."""
    truth = LATENCY.solve()
    rows: list[list[object]] = []
    for length in (1024, 4096, 8192, 16384, 32768, 65536, 131072):
        alone = 1e3 * truth.step_time(Load().add_decode(length))
        beside = 1e3 * truth.step_time(Load().add_decode(length).add_decode(131072))
        prefill = float(truth.prefill_times(np.array([float(length)]), np.zeros(1), LATENCY.chunk)[0])
        there = PUBLISHED.get(length)
        rows.append([length, alone, there and there[0], beside, beside - alone, prefill, there and there[1]])
    titles = ["tokens", "decode step, ms", "paper", "beside one of 128K, ms", "idle, ms", "prefill, s", "paper"]
    return Table("Step times by length (Figure 1b)", titles, rows)


RATES = (2.8, 3.0, 3.4, 4.0, 5.0)
PAPER4: Mapping[str, Sequence[float | None]] = {
    "paper, DistServe": (100, 76.1, 60.5, None, 15.5),
    "paper, Kairos": (100, 100, 76.9, None, 16.1),
}


def figure4(args: argparse.Namespace) -> Table:
    """Make Figure 4: TTFT attained by rate, of all requests and of the longest."""
    sizes = args.requests or REQUESTS, args.seeds or SEEDS
    made = page.spread(args, _figure4, [(policy, *sizes) for policy in POLICIES])
    rows = [[name, *values] for name, values in PAPER4.items()]
    titles = ["policy", *(f"{rate} req/s" for rate in RATES)]
    return Table("TTFT attained in %, of all (of prompts of 64K and more)", titles, [*rows, *made])


def _figure4(case: tuple[str, int, int]) -> list[str]:
    policy, count, seeds = case
    cells = []
    for rate in RATES:
        reports = [
            simulate(Prompts(), policy, "2x4", LATENCY, seed, qps=rate, num_requests=count) for seed in range(seeds)
        ]
        attained = fmean(report.summary.ttft_attained for report in reports)
        long = fmean(report.summary.by_length[">=64K"].attained for report in reports)
        cells.append(f"{100 * attained:.1f} ({100 * long:.0f})")
    return [f"`{policy}`", *cells]


class Case(NamedTuple):
    """One simulation of prefill and decode."""

    policy: str
    rate: float
    seed: int
    requests: int
    context: float | None = None  # seconds per token of context beyond the longest; None: the preset's


def run(case: Case) -> Summary:
    latency = LATENCY if case.context is None else LATENCY.with_coefficients({"context": case.context})
    return simulate(K128, case.policy, "2x4", latency, case.seed, qps=case.rate, num_requests=case.requests).summary


BOTH = ("distserve", "kairos:literal", "kairos:verbatim", "kairos")
SWEPT = (2.0, 2.8, 3.0, 3.4, 4.0, 4.2, 5.0)


@cache
def swept(jobs: int, requests: int, seeds: int) -> dict[Case, Summary]:
    """Simulate the cases of Figures 3, 5 and 6."""
    cases = [Case(one, rate, seed, requests) for one in BOTH for rate in SWEPT for seed in range(seeds)]
    return dict(zip(cases, page.spread(argparse.Namespace(jobs=jobs), run, cases), strict=True))


Value = Callable[[Summary], float]


def over_seeds(args: argparse.Namespace, policy: str, rate: float, value: Value) -> list[float]:
    count, seeds = args.requests or REQUESTS, args.seeds or SEEDS
    found = swept(args.jobs, count, seeds)
    return [value(found[Case(policy, rate, seed, count)]) for seed in range(seeds)]


SIDES: dict[str, Value] = {
    "both, %": lambda summary: 100 * summary.attained,
    "TTFT": lambda summary: 100 * summary.ttft_attained,
    "TPOT": lambda summary: 100 * summary.tpot_attained,
    "both, by tokens": lambda summary: 100 * summary.token_weighted,
    "64K and more": lambda summary: 100 * summary.by_length[">=64K"].attained,
    "median tokens/s": lambda summary: summary.median_speed,
    "all tokens/s": lambda summary: summary.output_throughput,
}


def sides(args: argparse.Namespace) -> Table:
    """Make Figures 3, 5 and 6: TTFT, TPOT and speed under each reading of the paper."""
    rows: list[list[object]] = []
    for rate in SWEPT:
        for policy in BOTH:
            cells = [fmean(over_seeds(args, policy, rate, value)) for value in SIDES.values()]
            shown = [f"{one:.1f}" if number < 6 else f"{one:.0f}" for number, one in enumerate(cells)]
            rows.append([f"{rate:.1f}", f"`{policy}`", *shown])
    panels = []
    for name in ("both, %", "TTFT", "TPOT", "median tokens/s"):
        curves = {
            policy: plot.Series(SWEPT, [fmean(over_seeds(args, policy, rate, SIDES[name])) for rate in SWEPT])
            for policy in BOTH
        }
        panels.append(plot.Panel(name, "requests/s", name if "tokens" in name else "attained, %", curves))
    page.picture("kairos-sides.png", panels)
    return Table("Both sides (Figures 3, 5 and 6)", ["requests/s", "policy", *SIDES], rows)


PAPER = {  # numbers in the paper's text, by figure: rate, DistServe, Kairos
    "3: both": ("both, %", {2.0: ("63–74", "92–97"), 3.0: (55.8, 89.6), 4.0: (29.0, 47.2), 4.2: (22.8, 38.9)}),
    "5: TPOT": ("TPOT", {2.0: (73.7, 96.6), 3.0: (62.5, 89.6)}),
    "6: median tokens/s": ("median tokens/s", {2.0: (23.6, 28.1), 5.0: (20.9, 22.6)}),
}


def figures356(args: argparse.Namespace) -> Table:
    """Make the points of Figures 3, 5 and 6 for which the paper's text gives a number."""
    rows: list[list[object]] = []
    for figure, (name, points) in PAPER.items():
        for rate, published in points.items():
            cells: list[object] = []
            for policy, there in zip(("distserve", "kairos"), published, strict=True):
                values = over_seeds(args, policy, rate, SIDES[name])
                cells += [there, f"{fmean(values):.1f} [{min(values):.1f}, {max(values):.1f}]"]
            rows.append([figure, f"{rate:.1f}", *cells])
    titles = ["figure", "requests/s", "paper, DistServe", "here", "paper, Kairos", "here"]
    return Table("Figures 3, 5 and 6: mean of seeds, lowest and highest", titles, rows)


def context(args: argparse.Namespace) -> Table:
    """Make the table by the cost of a token of context beyond the longest row, which no paper gives."""
    count = args.requests or REQUESTS
    settings = [(beta, rate) for beta in (0.0, 15e-9, 40e-9) for rate in (2.0, 4.0)]
    policies = ("distserve", "kairos:literal", "kairos")
    cases = [Case(policy, rate, 0, count, beta) for beta, rate in settings for policy in policies]
    found = iter(page.spread(args, run, cases))
    rows = []
    for beta, rate in settings:
        cells = [f"{100 * one.attained:.1f} / {100 * one.tpot_attained:.1f}" for one in (next(found) for _ in range(3))]
        rows.append([f"{1e9 * beta:.0f} ns", f"{rate:.0f}", *cells])
    titles = ["`context`", "requests/s", "`distserve`", "`kairos:literal`", "`kairos`"]
    return Table("Both objectives / TPOT alone, %, by the cost of context; seed 0", titles, rows)


MAKERS = (lengths, steps, figure4, figures356, sides, context)

if __name__ == "__main__":
    raise SystemExit(page.run(__doc__, "kairos", MAKERS))
