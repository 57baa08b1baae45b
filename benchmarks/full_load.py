"""Simulate full load for a long time: steady-state attainment by prompt length, and utilization of the instances.

    python benchmarks/full_load.py                          # K128 on one prefill and one decode instance: a table, JSON
    python benchmarks/full_load.py --policy kairos --routing auto --qps 2 2.5

The first and last `--skip` requests are not counted: the empty queues at the start and the draining queues at the end
would overstate attainment.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import common

from jaxserve.config import load_yaml, preset
from jaxserve.report import progress
from jaxserve.report.table import print_table
from jaxserve.sched.metrics import Summary, summarize
from jaxserve.sched.sim import NAMED, Latency, Options, Report, simulate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="K128", choices=sorted(NAMED), metavar="NAME", help="[K128]")
    parser.add_argument("--policy", default="unified", metavar="NAME", help="[unified]")
    parser.add_argument("--routing", default="unified", metavar="NAME", help="[unified]")
    parser.add_argument("--mesh", default="2x4", metavar="RxT", help="[2x4]")
    parser.add_argument("--qps", type=float, nargs="+", default=[3.1], metavar="RATE", help="requests/s [3.1]")
    parser.add_argument("--requests", type=int, default=4000, metavar="N", help="[4000]")
    parser.add_argument("--skip", type=int, default=500, metavar="N", help="not counted at either end [500]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="[0]")
    common.add_output(parser, "full_load")
    args = parser.parse_args()
    runs = {qps: _run(args, qps) for qps in args.qps}
    steady = {qps: summarize(report.measured, args.skip) for qps, report in runs.items()}
    print_table(
        f"{args.workload}, {args.policy} on {args.mesh}, steady state: attained, %",
        ["requests/s", "all", "by tokens", *next(iter(steady.values())).by_length, "busy"],
        [_row(qps, steady[qps], runs[qps]) for qps in runs],
    )
    payload = {
        str(qps): {"steady": steady[qps].as_dict(), "busy": dict(zip(one.instances, one.busy, strict=True))}
        for qps, one in runs.items()
    }
    shape = {key: value for key, value in vars(args).items() if not isinstance(value, Path)}
    common.save(args, {"asked": shape, "runs": payload})


def _run(args: argparse.Namespace, qps: float) -> Report:
    latency = load_yaml(preset("latency", "minimax-m2.5-h200-tp4"), Latency)
    options = Options(routing=args.routing, boundary="layer")
    with progress.bar(f"{qps:g} requests/s") as tick:
        return simulate(
            NAMED[args.workload],
            args.policy,
            args.mesh,
            latency,
            args.seed,
            qps=qps,
            num_requests=args.requests,
            options=options,
            progress=tick,
        )


def _row(qps: float, steady: Summary, report: Report) -> list[str]:
    shares = [f"{100 * one.attained:.1f} of {one.requests}" for one in steady.by_length.values()]
    busy = " ".join(f"{100 * share:.0f}" for share in report.busy)
    return [f"{qps:g}", f"{100 * steady.attained:.1f}", f"{100 * steady.token_weighted:.1f}", *shares, busy]


if __name__ == "__main__":
    main()
