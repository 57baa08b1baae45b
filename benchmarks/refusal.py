"""What bounded waits cost under overload: admission controls that refuse, beside a queue timeout.

Chat (500 tokens, TTFT 1 s) and documents (32K tokens, TTFT 10 s), one in ten requests, under `unified` on one
simulated instance that cannot keep all on time. Each setting at each load: the share of requests whose objectives were
kept, by class, the share that was refused, and the time to first token of those that were served.

    python benchmarks/refusal.py                    # a table, JSON and docs/images/refusal.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import common
import numpy as np
from weights import CHAT, DOCUMENTS

from jaxserve.config import load_yaml, preset
from jaxserve.report import plot
from jaxserve.report.table import print_table
from jaxserve.sched.sim import Latency, Mesh, Options, simulate
from jaxserve.sched.sim.workload import Mix, Share

PLOT = common.ROOT / "docs" / "images" / "refusal.png"
MIX = Mix("chat and documents", (Share(9, CHAT), Share(1, DOCUMENTS)))
SETTINGS = {
    "none": Options(),
    "--queue-timeout 30s": Options(queue_timeout=30.0),
    "--queue-timeout 12s": Options(queue_timeout=12.0),
    "--admission dp:refuse": Options(admission="dp:refuse"),
    "--admission pab:refuse": Options(admission="pab:refuse"),
}


def served(name: str, qps: float, args: argparse.Namespace) -> dict[str, Any]:
    """Return the outcome of one setting at one load, over all seeds."""
    latency = load_yaml(preset("latency", "minimax-m2.5-h200-tp4"), Latency)
    measured = [
        one
        for seed in range(args.seeds)
        for one in simulate(
            MIX, "unified", Mesh(1, 4), latency, seed, qps=qps, num_requests=args.requests, options=SETTINGS[name]
        ).measured
    ]
    kept = {
        group: float(np.mean([one.attained for one in measured if group in (one.class_, "all")]))
        for group in ("all", "chat", "documents")
    }
    refused = float(np.mean([one.reason in ("refused", "expired") for one in measured]))
    p50, p99, most = np.quantile([one.ttft for one in measured if np.isfinite(one.ttft)], [0.5, 0.99, 1.0]).tolist()
    return {"setting": name, "qps": qps, **kept, "refused": refused, "ttft p50": p50, "ttft p99": p99, "longest": most}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qps", type=float, nargs="+", default=[3, 6, 12, 24, 48], metavar="RATE", help="requests/s")
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="[1000]")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="[2]")
    parser.add_argument("--plot", type=Path, default=PLOT, metavar="FILE", help="[docs/images/refusal.png]")
    common.add_output(parser, "refusal")
    args = parser.parse_args()
    rows = []
    for qps in args.qps:
        for name in SETTINGS:
            rows.append(served(name, qps, args))
            print(rows[-1], flush=True)
    print_table("bounded waits under overload, seconds", [*rows[0]], [[*row.values()] for row in rows])
    lines = {name: plot.Series(args.qps, [row["all"] for row in rows if row["setting"] == name]) for name in SETTINGS}
    waits = {
        name: plot.Series(args.qps, [row["longest"] for row in rows if row["setting"] == name]) for name in SETTINGS
    }
    panels = [
        plot.Panel("requests whose objectives were kept", "requests/s", "attained", lines, (0.0, 1.02)),
        plot.Panel("longest time to first token", "requests/s", "seconds", waits),
    ]
    plot.lines(args.plot, panels)
    common.save(args, {"rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
