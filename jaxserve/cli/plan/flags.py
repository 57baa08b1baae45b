"""The flags of `jaxserve plan` that describe a load, and their checks."""

from __future__ import annotations

import argparse
from math import inf
from pathlib import Path

from jaxserve.capacity.candidates import POLICIES
from jaxserve.errors import InvalidValue
from jaxserve.whole_file import check_output
from jaxserve.yamlio import seconds

OBJECTIVES = {"ttft": 300.0, "tpot": 5.0, "tbt": 60.0}  # seconds above which one was meant in milliseconds
FLAGS = (
    "workload", "ttft_slo", "tpot_slo", "tbt_slo", "attainment", "policies", "latency", "num_requests", "price",
    "plot", "manifest", "jobs",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a capacity question."""
    group = parser.add_argument_group("load", "with --qps: which set-up serves this load with the fewest devices")
    group.add_argument("--qps", type=float, metavar="N", help="requests per second; of workloads in rounds, sessions")
    group.add_argument(
        "--workload", metavar="NAME|FILE|trace:FILE", help="as for jaxserve simulate, as in interactive-chat or K128"
    )
    for name, text in (
        ("ttft", "time to first token, as in 500ms; replaces the workload's"),
        ("tpot", "mean time per further token; replaces the workload's"),
        ("tbt", "largest gap between two tokens [none]"),
    ):
        group.add_argument(f"--{name}-slo", type=seconds, metavar="TIME", help=text)
    group.add_argument(
        "--attainment", type=float, metavar="SHARE", help="share of the requests that must keep their objectives [0.9]"
    )
    group.add_argument("--policies", metavar="NAME[,NAME…]", help=f"policies to try [{','.join(POLICIES)}]")
    group.add_argument(
        "--latency", metavar="NAME|FILE", help="latency preset of this model and device, as jaxserve fit writes it"
    )
    group.add_argument("--num-requests", type=int, metavar="N", help="requests to simulate [30 s of load, 400 to 800]")
    group.add_argument("--price", type=float, metavar="X", help="of a device for an hour: prints the cost of tokens")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw attainment and goodput by devices (PNG, SVG)")
    group.add_argument("--manifest", type=Path, metavar="FILE", help="write the answer as a Kubernetes manifest (YAML)")
    group.add_argument("--jobs", type=int, metavar="N", help="processes [all cores]")


def check_arguments(args: argparse.Namespace) -> None:
    """Raise InvalidValue for flags of a load without --qps, and for values that cannot be meant."""
    if args.qps is None:
        given = [name for name in FLAGS if getattr(args, name) is not None]
        if given:
            raise InvalidValue(f"--{given[0].replace('_', '-')} needs --qps, the requests per second", given[0])
        return
    if args.compile:
        raise InvalidValue("--compile is for a plan without --qps", "compile")
    if args.workload is None:
        raise InvalidValue("--qps needs --workload, a name, FILE.yaml or trace:FILE", "workload")
    for name in ("qps", "price"):
        value = getattr(args, name)
        if value is not None and not 0 < value < inf:
            raise InvalidValue(f"{name}={value:g} must be above 0", name)
    if args.attainment is not None and not 0 < args.attainment <= 1:
        raise InvalidValue(f"attainment={args.attainment:g} must be a share above 0 and at most 1", "attainment")
    if args.num_requests is not None and args.num_requests < 1:
        raise InvalidValue(f"num_requests={args.num_requests} must be at least 1", "num_requests")
    for name, most in OBJECTIVES.items():
        value = getattr(args, f"{name}_slo")
        if value is not None and not 0 < value <= most and value != inf:
            meant = f"; {value:g}ms is {value:g} milliseconds" if value > most else ""
            raise InvalidValue(
                f"{name}_slo={value:g} s must be above 0 and at most {most:g} s, or inf: a number without unit is in "
                f"seconds{meant}",
                f"{name}_slo",
            )
    for name in ("plot", "manifest"):
        if getattr(args, name) is not None:
            check_output(getattr(args, name), name)
