"""The flags of `jaxserve plan` that describe a load, and their checks."""

from __future__ import annotations

import argparse
from math import inf
from pathlib import Path

from jaxserve.capacity.search import POLICIES
from jaxserve.cli.flags import add_flags
from jaxserve.errors import InvalidValue
from jaxserve.whole_file import check_output
from jaxserve.yamlio import seconds

OBJECTIVES = {"ttft": 300.0, "tpot": 5.0, "tbt": 60.0}  # seconds above which one was meant in milliseconds
ROWS = (
    ("--qps", float, None, "N", "requests per second; of workloads in rounds, sessions"),
    ("--workload", None, None, "NAME|FILE|trace:FILE", "as for jaxserve simulate, as in interactive-chat or K128"),
    ("--ttft-slo", seconds, None, "TIME", "time to first token, as in 500ms; replaces the workload's"),
    ("--tpot-slo", seconds, None, "TIME", "mean time per further token; replaces the workload's"),
    ("--tbt-slo", seconds, None, "TIME", "largest gap between two tokens [none]"),
    ("--attainment", float, None, "SHARE", "share of the requests that must keep their objectives [0.9]"),
    ("--policies", None, None, "NAME[,NAME…]", f"policies to try [{','.join(POLICIES)}]"),
    ("--latency", None, None, "NAME|FILE", "latency preset of this model and device, as jaxserve fit writes it"),
    ("--num-requests", int, None, "N", "requests to simulate [30 s of load, 400 to 800]"),
    ("--price", float, None, "X", "of a device for an hour: prints the cost of tokens"),
    ("--plot", Path, None, "FILE", "draw attainment and goodput by devices (PNG, SVG)"),
    ("--manifest", Path, None, "FILE", "write the answer as a Kubernetes manifest (YAML)"),
    ("--jobs", int, None, "N", "processes [all cores]"),
)
FLAGS = tuple(name[2:].replace("-", "_") for name, *_ in ROWS[1:])  # all but --qps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load", "with --qps: which set-up serves this load with the fewest devices")
    add_flags(group, *ROWS)


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
