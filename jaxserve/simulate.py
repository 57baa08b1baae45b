"""`jaxserve simulate`: policies on workloads, on a model of the devices, in seconds and without a device."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jaxserve.config import preset
from jaxserve.errors import InvalidValue
from jaxserve.report import progress
from jaxserve.sched.placement import PLACEMENTS
from jaxserve.sched.sim import (
    NAMED,
    Arrival,
    Latency,
    Mesh,
    Mix,
    Options,
    Report,
    Workload,
    load_trace,
    simulate,
    sweep,
)
from jaxserve.sched.sim.sweep import Case
from jaxserve.sched.slo import SLO
from jaxserve.simulate_report import print_report, write_report
from jaxserve.yamlio import load_yaml, nearest, seconds

EXAMPLES = """
examples:
  # Two policies over 16 rates with three seeds; table here, JSON, CSV and plots in DIR
  jaxserve simulate --policy distserve,kairos --qps 2.0:5.0:0.2 --seeds 3 --out DIR

  # One rate, steady state: the first and last 500 of 4000 requests are not counted
  jaxserve simulate --policy kairos --qps 3 --num-requests 4000 --skip 500

  # A public trace at its own rate; prefixes that it names are shared
  jaxserve simulate --workload trace:conversation_trace.jsonl.gz --num-prompts 2000 --ttft-slo 8s

  # The same trace at three rates, prompts a fourth as long, on four instances of which one prefills
  jaxserve simulate --mesh 4x4 --prefill 1 --workload trace:conversation_trace.jsonl.gz --prompt-scale 4 --qps 2,4,6

  # Any mixture of halves, and a workload of your own
  jaxserve simulate --policy prefill=kairos,decode=continuous --workload my.yaml --qps 3

A latency preset says how long a step takes (configs/latency/*.yaml), a workload preset what arrives
(configs/workload/*.yaml). docs/simulator.md says what the model leaves out.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `jaxserve simulate`."""
    parser.description = "Serve a workload in virtual time, by the scheduler that serves in real time."
    parser.epilog = EXAMPLES
    what = parser.add_argument_group("what to try")
    what.add_argument(
        "--policy", default="distserve,kairos", metavar="NAME[,NAME…]", help="policies to compare [%(default)s]"
    )
    what.add_argument("--qps", metavar="RATES", help="requests per second: 3, or 2,3,4, or first:last:step")
    what.add_argument("--seeds", type=int, default=1, metavar="N", help="repeat with N seeds, from --seed on [1]")
    what.add_argument("--seed", type=int, default=0, metavar="N", help="first seed [0]")
    _cluster(parser.add_argument_group("cluster"))
    _workload(parser.add_argument_group("workload"))
    out = parser.add_argument_group("output")
    out.add_argument("--skip", type=int, default=0, metavar="N", help="do not count the first and last N requests [0]")
    out.add_argument("--out", type=Path, metavar="DIR", help="write results.json, results.csv and plots there")
    out.add_argument("--jobs", type=int, metavar="N", help="processes [all cores, at most one a simulation]")


def _cluster(group: Any) -> None:
    group.add_argument("--mesh", default="2x4", help="RxT: R instances of T devices; from two on, half prefill [2x4]")
    group.add_argument("--prefill", type=int, metavar="N", help="how many instances prefill")
    group.add_argument("--mode", choices=("auto", "colocated"), default="auto", help="colocated: all do both [auto]")
    group.add_argument(
        "--latency", default="minimax-m2.5-h200-tp4", metavar="NAME|FILE", help="latency preset [%(default)s]"
    )
    group.add_argument("--noise", type=float, metavar="S", help="relative standard deviation of step times")
    group.add_argument(
        "--perf",
        choices=("general", "exact", "table", "linear"),
        default="general",
        help="the scheduler's step-time model: the true one corrected online, the true one, Kairos's table, "
        "FairBatching's line [general]",
    )
    group.add_argument(
        "--placement",
        default="least_work",
        choices=sorted(PLACEMENTS),
        help="which instance takes a request [least_work]",
    )
    group.add_argument("--first-token", choices=("prefill", "decode"), default="prefill", help="who sends it [prefill]")
    group.add_argument("--max-num-batched-tokens", type=int, default=8192, metavar="N", help="tokens in a step [8192]")
    group.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="requests on an instance [256]")
    group.add_argument("--block-size", type=int, metavar="N", help="tokens in a page of KV [the preset's]")
    group.add_argument("--num-pages", type=int, metavar="N", help="pages of an instance [the preset's KV tokens]")
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="[on where a trace says which prefixes are shared]",
    )


def _workload(group: Any) -> None:
    group.add_argument(
        "--workload",
        default="K128",
        metavar="NAME|FILE|trace:FILE",
        help=f"{', '.join(NAMED)}, a preset or YAML file, or a trace: Azure CSV, Mooncake JSONL or plain CSV, also "
        "gzipped [K128]",
    )
    group.add_argument("--num-requests", "--num-prompts", type=int, metavar="N", help="how many [1000; all of a trace]")
    group.add_argument("--ttft-slo", type=seconds, metavar="TIME", help="instead of the workload's, as in 8s")
    group.add_argument("--tpot-slo", type=seconds, metavar="TIME", help="instead of the workload's, as in 50ms")
    group.add_argument("--time-scale", type=float, default=1.0, metavar="X", help="trace: arrival times times X [1]")
    group.add_argument(
        "--prompt-scale", type=float, default=1.0, metavar="X", help="trace: divide prompt lengths by X [1]"
    )
    group.add_argument(
        "--output-scale", type=float, default=1.0, metavar="X", help="trace: divide output lengths by X [1]"
    )
    group.add_argument(
        "--spread",
        type=seconds,
        default=0.0,
        metavar="TIME",
        help="trace: spread requests of one timestamp over this time; Mooncake batches some 3s into one [0: as it is]",
    )


def main(args: argparse.Namespace) -> int:
    """Run it. Raises InvalidValue for what a person got wrong."""
    policies = parse_policies(args.policy)
    latency = _latency(args)
    mesh = Mesh.parse(args.mesh, args.prefill, colocated=args.mode == "colocated")
    options = Options(
        perf=args.perf,
        placement=args.placement,
        tokens=args.max_num_batched_tokens,
        rows=args.max_num_seqs,
        first_token=args.first_token,
        prefix_caching=args.enable_prefix_caching,
        pages=args.num_pages,
        page_size=args.block_size,
        skip=args.skip,
    )
    if args.seeds < 1 or args.skip < 0:
        raise InvalidValue(f"seeds={args.seeds} must be at least 1 and skip={args.skip} at least 0", "seeds")
    workload = _read_workload(args)
    rates: Sequence[float | None] = parse_rates(args.qps) if args.qps else (None,)
    seeds = range(args.seed, args.seed + args.seeds)
    with progress.bar("simulating") as tick:
        if len(policies) * len(rates) * len(seeds) == 1:
            reports = [
                simulate(
                    workload,
                    policies[0],
                    mesh,
                    latency,
                    seeds[0],
                    qps=rates[0],
                    num_requests=args.num_requests,
                    options=options,
                    progress=tick,
                )
            ]
        else:
            reports = sweep(
                workload,
                policies,
                mesh,
                latency,
                rates=rates,
                seeds=seeds,
                num_requests=args.num_requests,
                options=options,
                progress=tick,
                run=processes(args.jobs),
            )
    title = f"{args.workload} on {mesh} of {latency.name}"
    print_report(title, reports)
    if args.out is not None:
        settings: dict[str, Any] = {name: _plain(value) for name, value in sorted(vars(args).items()) if name != "out"}
        settings["coefficients"] = asdict(latency.solve())
        for path in write_report(args.out, title, settings, reports):
            print(f"wrote {path}")
    return 0


def parse_policies(text: str) -> list[str]:
    """`a,b` and `prefill=x,decode=y`, which has a comma of its own, also mixed."""
    halves = r"prefill=[^,]*,decode=[^,]*|decode=[^,]*,prefill=[^,]*"
    names = [name.strip() for name in re.findall(rf"{halves}|[^,]+", text) if name.strip()]
    if not names:
        raise InvalidValue("policy must name at least one", "policy")
    return list(dict.fromkeys(names))


def parse_rates(text: str) -> list[float]:
    """`3`, `2,3,4` or `first:last:step`, both ends included."""
    try:
        if ":" in text:
            first, last, step = (float(part) for part in text.split(":"))
            if step <= 0 or last < first:
                raise ValueError
            rates = [round(first + i * step, 9) for i in range(int((last - first) / step + 1e-9) + 1)]
        else:
            rates = [float(part) for part in text.split(",")]
        if not rates or not all(0 < rate < float("inf") for rate in rates):
            raise ValueError
    except ValueError as error:
        raise InvalidValue(f"qps={text!r} must be as 3, 2,3,4 or 2.0:5.0:0.2, all positive", "qps") from error
    return rates


def _latency(args: argparse.Namespace) -> Latency:
    path = Path(args.latency)
    if path.suffix not in (".yaml", ".yml"):
        path = preset("latency", args.latency)
    latency = load_yaml(path, Latency)
    return latency if args.noise is None else replace(latency, noise=args.noise)


def _read_workload(args: argparse.Namespace) -> Workload | Mix | list[Arrival]:
    given = {name: getattr(args, f"{name}_slo") for name in ("ttft", "tpot")}
    given = {name: value for name, value in given.items() if value is not None}
    kind, _, path = args.workload.partition(":")
    if kind == "trace" and path:
        with progress.bar(f"reading {path}") as tick:
            return load_trace(
                path,
                slo=SLO(**given),
                num_prompts=args.num_requests,
                time_scale=args.time_scale,
                prompt_scale=args.prompt_scale,
                output_scale=args.output_scale,
                spread=args.spread,
                progress=tick,
            )
    if args.workload in NAMED:
        workload = NAMED[args.workload]
    elif Path(args.workload).suffix in (".yaml", ".yml"):
        workload = load_yaml(args.workload, Workload)
    else:
        try:
            workload = load_yaml(preset("workload", args.workload), Workload)
        except InvalidValue as error:
            hint = nearest(args.workload, NAMED)
            raise InvalidValue(f"{error}; built in: {hint}; or FILE.yaml, or trace:FILE", "workload") from error
    if not args.qps:
        raise InvalidValue(f"workload {args.workload} needs a rate, as in --qps 3 or --qps 2.0:5.0:0.2", "qps")
    return replace(workload, **given)


def processes(jobs: int | None) -> Callable[[Callable[[Case], Report], Sequence[Case]], Iterable[Report]]:
    """A map over cases by several processes, in order."""
    if jobs is not None and jobs < 1:
        raise InvalidValue(f"jobs={jobs} must be at least 1", "jobs")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def run(cell: Callable[[Case], Report], cases: Sequence[Case]) -> Iterable[Report]:
        count = min(jobs or cores, len(cases))
        if count == 1:
            yield from map(cell, cases)
            return
        with multiprocessing.get_context("spawn").Pool(count) as pool:
            yield from pool.imap(cell, cases)

    return run


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
