"""Attainment of each class against the weight of one of them, where not all requests can be on time.

Chat (500 tokens, TTFT 1 s) and documents (32K tokens, TTFT 10 s), one in ten requests, on one simulated instance under
overload. Documents get the weights of `--weights`, chat has 1.

    python benchmarks/weights.py                    # a table, JSON and docs/images/weights.png
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import common
import numpy as np

from jaxserve.config import load_yaml, preset
from jaxserve.report import plot
from jaxserve.report.table import print_table
from jaxserve.sched.sim import Latency, Mesh, Options, simulate
from jaxserve.sched.sim.workload import Lengths, Mix, Share, Workload

PLOT = common.ROOT / "docs" / "images" / "weights.png"
ANSWERS = Lengths("lognormal", mean=100, std=60, low=4, high=1024)
CHAT = Workload(
    "chat", Lengths("lognormal", median=500, sigma=0.8, low=16, high=8192), ANSWERS, ttft=1.0, tpot=0.1,
    request_class="chat",
)  # fmt: skip
DOCUMENTS = Workload(
    "documents", Lengths("lognormal", median=32768, sigma=0.3, low=16384, high=65536), ANSWERS, ttft=10.0, tpot=0.1,
    request_class="documents",
)  # fmt: skip


def served(weight: float, args: argparse.Namespace) -> dict[str, float]:
    """Return the attainment of each class and of all, as means over the seeds."""
    latency = load_yaml(preset("latency", "minimax-m2.5-h200-tp4"), Latency)
    mix = Mix("chat and documents", (Share(9, CHAT), Share(1, replace(DOCUMENTS, weight=weight))))
    found: dict[str, list[float]] = {"chat": [], "documents": [], "all": []}
    for seed in range(args.seeds):
        measured = simulate(
            mix, "unified", Mesh(1, 4), latency, seed, qps=args.qps, num_requests=args.requests, options=Options()
        ).measured
        for name, kept in found.items():
            kept.append(float(np.mean([one.attained for one in measured if name in (one.class_, "all")])))
    return {"weight": weight} | {name: float(np.mean(kept)) for name, kept in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=float, nargs="+", default=[1, 8, 16, 32, 48, 64, 128], metavar="W")
    parser.add_argument("--qps", type=float, default=12.0, metavar="RATE", help="requests/s [12]")
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="[1000]")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="[2]")
    parser.add_argument("--plot", type=Path, default=PLOT, metavar="FILE", help="[docs/images/weights.png]")
    common.add_output(parser, "weights")
    args = parser.parse_args()
    rows = []
    for weight in args.weights:
        rows.append(served(weight, args))
        print(rows[-1], flush=True)
    print_table("attainment by the documents' weight", [*rows[0]], [[*row.values()] for row in rows])
    lines = {name: plot.Series(args.weights, [row[name] for row in rows]) for name in ("chat", "documents", "all")}
    panel = plot.Panel("attainment by class", "weight of documents", "attained", lines, (0.0, 1.02), log_x=True)
    plot.lines(args.plot, panel)
    common.save(args, {"rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
