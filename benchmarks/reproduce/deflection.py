"""Load-aware prefill deflection on two prefill and two decode instances: P95 TTFT and attainment by placement.

TTFT counts to the arrival of the KV at the decode side, as in that paper. Under two minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # measure this checkout, installed or not

from jaxserve.config import load_yaml, preset
from jaxserve.report.table import print_table
from jaxserve.sched.sim import Latency, Options, simulate
from jaxserve.sched.sim.scenarios import NAMED

LATENCY = load_yaml(preset("latency", "deepseek-v2-lite-a100"), Latency)
RATES = (6.0, 10.0, 14.0, 18.0)
SYSTEMS = (
    ("distserve", "round_robin"),
    ("distserve", "least_work"),
    ("distserve", "deflect:faster"),
    ("distserve", "deflect:slo"),
    ("distserve", "deflect:dropped"),
    ("unified", "least_work"),
    ("unified", "unified"),
)


def row(system: tuple[str, str], count: int, seeds: int) -> list[str]:
    policy, placement = system
    cells = []
    for rate in RATES:
        reports = [
            simulate(
                NAMED["deflection"],
                policy,
                "4x1",
                LATENCY,
                seed,
                qps=rate,
                num_requests=count,
                options=Options(placement=placement, first_token="decode"),
            )
            for seed in range(seeds)
        ]
        late = fmean(report.summary.ttft.p95 for report in reports)
        attained = fmean(report.summary.attained for report in reports)
        cells.append(f"{late:.2f} s, {100 * attained:.1f}")
    return [f"{policy}, {placement}", *cells]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=1000, metavar="N", help="requests a run [1000]")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs a cell [1]")
    args = parser.parse_args(argv)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        count = len(SYSTEMS)
        rows = list(pool.map(row, SYSTEMS, [args.num_requests] * count, [args.seeds] * count))
    titles = ["policy, placement", *(f"{rate:g} req/s" for rate in RATES)]
    print_table("P95 TTFT, and % attained (TTFT 2 s, TPOT and TBT 100 ms)", titles, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
