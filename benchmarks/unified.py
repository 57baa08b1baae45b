"""Compare the goodput of `unified` with the policies of five papers, as published and repaired, and with upper bounds.

    python benchmarks/unified.py                         # all workloads on 1P+1D: a table (slow)
    python benchmarks/unified.py --workload K128 --mesh 2x4 --systems "published;unified" --output found.json

A system is a policy with its routing and roles; colocated systems have only mixed instances. Goodput is the highest
rate (requests/s) at which 90 % of 1,000 requests attain both objectives, searched to within 3 %. Traces are stretched
to the rate, which keeps their order and burstiness. The clairvoyant bounds are for the same servers, with deflection
and with prompts on prefill instances only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from common import origin

from jaxserve.config import load_yaml, preset
from jaxserve.report import progress
from jaxserve.report.table import print_table
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.sim import Arrival, Mesh
from jaxserve.sched.sim.latency import Latency
from jaxserve.sched.sim.options import Options
from jaxserve.sched.sim.oracle import Details, goodput_bound, sustained_bound
from jaxserve.sched.sim.scenarios import NAMED
from jaxserve.sched.sim.sweep import goodput_search
from jaxserve.sched.sim.traces import load_trace

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
GOAL = 0.9
CHUNK = Options().tokens
# Whether deflection is allowed; None: the bound for an endless load.
BOUNDS = {"bound": True, "bound, prompts on prefill instances": False, "bound, load without end": None}


class System(NamedTuple):
    """A compared system: a policy, its routing, and whether its instances are mixed."""

    kind: str  # published, repaired, unified
    policy: str
    routing: str = "least_work"
    colocated: bool = False
    boundary: str = "chunk"


SYSTEMS = {
    "distserve": System("published", "distserve"),
    "kairos as written": System("published", "kairos:literal"),
    "flowprefill as written": System("published", "flowprefill:literal", boundary="op"),
    "fairbatching as written": System("published", "fairbatching:anchor=arrival+use=1", colocated=True),
    "slos_serve": System("published", "slos_serve", colocated=True),
    "deflect, faster": System("published", "distserve", "deflect:faster"),
    "deflect, slo": System("published", "distserve", "deflect:slo"),
    "kairos": System("repaired", "kairos"),
    "flowprefill": System("repaired", "flowprefill", boundary="op"),
    "fairbatching": System("repaired", "fairbatching:on_time_set", colocated=True),
    "unified": System("unified", "unified", "unified", boundary="layer"),
    "unified, mixed instances": System("unified", "unified", "unified", colocated=True, boundary="layer"),
}


class Case(NamedTuple):
    """One cell of the table."""

    workload: str
    mesh: str
    system: str  # or one of BOUNDS
    requests: int
    seeds: int
    skip: int = 0


class Served(NamedTuple):
    """A load, and its changes to the latency preset and the options."""

    load: Any  # a workload to draw, or arrivals
    coefficients: Mapping[str, float] = MappingProxyType({})
    options: Mapping[str, Any] = MappingProxyType({})


# K128 under conditions that the schedulers or the papers do not assume.
VARIATIONS = {
    "K128 beta=0": Served(NAMED["K128"], {"context": 0.0}),
    "K128 beta=40ns": Served(NAMED["K128"], {"context": 40e-9}),
    "K128 alpha=beta=15ns": Served(NAMED["K128"], {"longest": 15e-9}),
    "K128 predicted +20%": Served(NAMED["K128"], {}, {"prediction_error": 0.2}),
    "K128 predicted -20%": Served(NAMED["K128"], {}, {"prediction_error": -0.2}),
    "K128 noise 0.2": Served(NAMED["K128"], {}, {"noise": 0.2}),
    "K128 bursty": Served(NAMED["K128-bursty"]),
    "K128 half the KV": Served(NAMED["K128"], {}, {"kv_scale": 0.5}),
}


def workload(name: str, count: int) -> Served:
    if name in VARIATIONS:
        return VARIATIONS[name]
    if name in NAMED:
        return Served(NAMED[name])
    file, slo, spread = {
        "mooncake-conversation": ("mooncake/conversation_trace.head40min.jsonl.gz", SLO(8.0, 0.05), 3.0),
        "mooncake-arxiv": ("mooncake/arxiv_mooncake_trace.head1000.jsonl", SLO(8.0, 0.05), 3.0),
        "azure-conversation": ("azure/AzureLLMInferenceTrace_conv.head40min.csv.gz", SLO(2.0, 0.05), 0.0),
        "azure-code": ("azure/AzureLLMInferenceTrace_code.head38min.csv", SLO(2.0, 0.05), 0.0),
    }[name]
    arrivals: Sequence[Arrival] = load_trace(TRACES / file, slo=slo, num_prompts=count, spread=spread)
    return Served(arrivals)


WORKLOADS = (
    "K128", "K100", "K32", "mooncake-conversation", "mooncake-arxiv", "azure-conversation",
    "azure-code", "flowprefill-llama3-70b", "slos-serve-mixed", "slos-serve-reasoning", *VARIATIONS,
)  # fmt: skip


def run(case: Case) -> tuple[Case, float, float]:
    """Return the goodput of one cell in requests/s, and the share attained at that rate."""
    load, coefficients, options = workload(case.workload, case.requests)
    latency = load_yaml(preset("latency", "minimax-m2.5-h200-tp4"), Latency)
    if coefficients:
        latency = latency.with_coefficients(coefficients)
    mesh = Mesh.parse(case.mesh)
    if case.system in BOUNDS:
        arrivals = load if isinstance(load, Sequence) else load.draw(case.requests, 1.0, 0)
        anywhere = BOUNDS[case.system]
        prefill = 0 if anywhere is not False else mesh.instances // 2
        if anywhere is None:
            servers = 0, mesh.instances
            return case, sustained_bound(arrivals, latency.solve(), *servers, deflection=True, chunk=CHUNK), GOAL
        servers, details = (prefill, mesh.instances - prefill), Details(skip=case.skip)
        return (
            case,
            goodput_bound(arrivals, latency.solve(), *servers, deflection=anywhere, chunk=CHUNK, details=details),
            GOAL,
        )
    system = SYSTEMS[case.system]
    found = goodput_search(
        load,
        [system.policy],
        replace(mesh, colocated=system.colocated),
        latency,
        seeds=range(1 if isinstance(load, Sequence) else case.seeds),  # a trace is one load
        num_requests=case.requests,
        options=Options(routing=system.routing, boundary=system.boundary, skip=case.skip, **options),
        goal=GOAL,
        tolerance=0.03,
        start=4.0,
    )
    (best,) = found.values()
    return case, best.rate, max((one.summary.attained for one in best.reports), default=0.0)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    wanted = args.systems.split(";")
    for name in args.workload or WORKLOADS:
        for mesh in args.mesh or ["2x4"]:
            for bound in () if args.no_bounds else BOUNDS:
                yield Case(name, mesh, bound, args.requests, args.seeds, args.skip)
            for system, one in SYSTEMS.items():
                if "all" in wanted or one.kind in wanted or system in wanted:
                    yield Case(name, mesh, system, args.requests, args.seeds, args.skip)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workload",
        action="append",
        choices=WORKLOADS,
        metavar="NAME",
        help="may be repeated [all]: " + ", ".join(WORKLOADS).replace("%", "%%"),
    )
    parser.add_argument("--mesh", action="append", metavar="RxT", help="may be repeated, as in 2x4 (1P+1D) [2x4]")
    parser.add_argument("--systems", default="all", help="all, or kinds and names with semicolons: published;unified")
    parser.add_argument("--requests", type=int, default=1000, metavar="N")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="of workloads; a trace is one load [1]")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="uncounted requests at either end [0]")
    parser.add_argument("--no-bounds", action="store_true", help="omit the clairvoyant bounds")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON; cases that it already has are not run again")
    args = parser.parse_args()
    done: dict[str, float] = {}
    if args.output is not None and args.output.exists():
        done = json.loads(args.output.read_text())["goodput"]
    todo = [case for case in cases(args) if _key(case) not in done]
    with ProcessPoolExecutor(args.jobs) as pool, progress.bar("simulating") as tick:
        for count, future in enumerate(as_completed([pool.submit(run, case) for case in todo]), 1):
            case, rate, _ = future.result()
            done[_key(case)] = rate
            tick(count, len(todo))
            if args.output is not None:
                document = {"origin": origin(), "requests": args.requests, "skip": args.skip, "goodput": done}
                args.output.write_text(json.dumps(document, indent=1) + "\n")
    show(args, done)
    return 0


def _key(case: Case) -> str:
    return f"{case.workload} | {case.mesh} | {case.system}"


def show(args: argparse.Namespace, done: dict[str, float]) -> None:
    names = [name for name in SYSTEMS if any(key.endswith(f"| {name}") for key in done)]
    rows: list[Sequence[object]] = []
    for name in args.workload or WORKLOADS:
        for mesh in args.mesh or ["2x4"]:
            got = {system: done.get(f"{name} | {mesh} | {system}") for system in (*names, *BOUNDS)}
            ours = got.get("unified")
            published = [
                rate for system, rate in got.items() if rate and SYSTEMS.get(system, System("", "")).kind == "published"
            ]
            repaired = [
                rate for system, rate in got.items() if rate and SYSTEMS.get(system, System("", "")).kind == "repaired"
            ]
            ratios = [
                f"{ours / max(one):.2f}" if ours and one else "–"
                for one in (published, repaired, *([got[bound]] if got[bound] else [] for bound in BOUNDS))
            ]
            rows.append([f"{name} {mesh}", *("–" if rate is None else f"{rate:.2f}" for rate in got.values()), *ratios])
    print_table(
        "Goodput at 90 % attained, requests/s",
        [
            "workload",
            *names,
            "bound",
            "bound, prefill only",
            "bound, without end",
            "x published",
            "x repaired",
            "x bound",
            "x prefill only",
            "x without end",
        ],
        rows,
    )


if __name__ == "__main__":
    sys.exit(main())
