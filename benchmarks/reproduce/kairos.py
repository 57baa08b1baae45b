"""Figure 4 of the Kairos paper (TTFT attainment by rate), to the letter and repaired, in two minutes on two cores.

Prompts alone: every request of K128 ends with its first token, so the decode side plays no part. Figures 3, 5 and 6
need it: docs/reproduction/kairos.md has their command.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # measure this checkout, installed or not

from jaxserve.config import load_yaml, preset
from jaxserve.report.table import print_table
from jaxserve.sched.sim import Arrival, Latency, simulate
from jaxserve.sched.sim.workload import K128

LATENCY = load_yaml(preset("latency", "minimax-m2.5-h200-tp4"), Latency)
RATES = (2.8, 3.0, 3.4, 4.0, 5.0)
PAPER = {"distserve": "100 / 76.1 / 60.5 / – / 15.5", "kairos": "100 / 100 / 76.9 / – / 16.1"}
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
    """K128, each request with one output token."""

    name: str = "K128, prompts alone"

    def draw(self, count: int, rate: float, seed: int) -> list[Arrival]:
        return [replace(arrival, output_tokens=1) for arrival in K128.draw(count, rate, seed)]


def row(policy: str, count: int, seeds: int) -> list[str]:
    cells = []
    for rate in RATES:
        reports = [
            simulate(Prompts(), policy, "2x4", LATENCY, seed, qps=rate, num_requests=count) for seed in range(seeds)
        ]
        everybody = fmean(report.summary.ttft_attained for report in reports)
        long = fmean(report.summary.by_length[">=64K"].attained for report in reports)
        cells.append(f"{100 * everybody:.1f} ({100 * long:.0f})")
    return [policy, *cells]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=1000, metavar="N", help="requests a run [1000]")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="runs a cell [2]")
    args = parser.parse_args()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        count = len(POLICIES)
        rows = list(pool.map(row, POLICIES, [args.num_requests] * count, [args.seeds] * count))
    titles = ["policy", *(f"{rate} req/s" for rate in RATES)]
    print_table("TTFT attained in %, of all (of prompts of 64K and more)", titles, rows)
    for policy, figures in PAPER.items():
        print(f"paper, {policy} at {' / '.join(map(str, RATES))} requests/s: {figures}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
