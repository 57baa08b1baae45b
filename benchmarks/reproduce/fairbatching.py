"""FairBatching's tables (arXiv 2510.14392): the paper's figures beside ours, in simulation.

    python benchmarks/reproduce/fairbatching.py table3      # peak effective requests/s of three workloads
    python benchmarks/reproduce/fairbatching.py table4      # latencies at 2.5 requests/s
    python benchmarks/reproduce/fairbatching.py table5      # gain over the better baseline by SLO
    python benchmarks/reproduce/fairbatching.py breakdown   # Figure 7: what each part brings
    python benchmarks/reproduce/fairbatching.py dp8         # Figure 8: eight instances behind a load balancer
    python benchmarks/reproduce/fairbatching.py traces --trace burstgpt=FILE --trace azure=FILE

Effective requests/s are the rate times the share of requests whose TTFT and worst mean time per token (the paper's max
over k of (t_k - t_0)/k) keep their SLO; refused ones do not. A peak is the best of a few rates, which are given as
shares of what prompts alone would allow. Step times are the presets' with 1.3 % noise, known to the schedulers.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common

from jaxserve.config import preset
from jaxserve.report import progress
from jaxserve.report.table import print_table
from jaxserve.sched.metrics import FINISHED, ROUNDING
from jaxserve.sched.sim import NAMED, Arrival, Latency, Mesh, Options, Workload, load_trace, simulate
from jaxserve.sched.slo import SLO
from jaxserve.yamlio import load_yaml

H20, A800 = "qwen3-14b-h20", "llama3-8b-a800"
SLOS = {"burstgpt": (0.5, 0.05), "qwen": (0.5, 0.05), "azure": (2.0, 0.05)}  # Table 2: TTFT, TPOT
SHARES = (0.35, 0.5, 0.65, 0.8)  # of the rate that prompts alone would allow
TUNED = ("sarathi", "sarathi:share=0.8", "sarathi:share=1.0")  # token budgets; the paper tunes them for each case
MAIN = {"vLLM": "vllm", "Sarathi": "sarathi", "FB": "fairbatching", "FB-PAB": "fairbatching/pab:refuse"}


class Job(NamedTuple):
    """One simulation. `system` is a policy, then an admission after a stroke, then a placement after another."""

    system: str
    workload: str
    rate: float
    requests: int
    model: str = H20
    slo: tuple[float, float] = (0.5, 0.05)
    instances: int = 1
    trace: str = ""


class Result(NamedTuple):
    job: Job
    ttft: tuple[float, ...]  # seconds, infinite where refused
    tpot: tuple[float, ...]  # the worst mean of each request, 0 where it has one token

    def effective(self, slo: tuple[float, float] | None = None) -> float:
        """Requests per second that keep `slo`, or the job's own."""
        ttft, tpot = slo or self.job.slo
        kept = (np.array(self.ttft) <= ttft + ROUNDING) & (np.array(self.tpot) <= tpot + ROUNDING)
        return self.job.rate * float(kept.mean())


def run(job: Job) -> Result:
    policy, admission, placement = (*job.system.split("/"), "", "")[:3]
    latency = load_yaml(preset("latency", job.model), Latency)
    options = Options(
        noise=0.013,
        admission=admission or "none",
        placement=placement or "least_work",
        stale=0.1 if job.instances > 1 else 0.0,
        routing_delay=0.005 if job.instances > 1 else 0.0,
    )
    mesh = Mesh(job.instances, colocated=True)
    report = simulate(arrivals(job), policy, mesh, latency, qps=job.rate, num_requests=job.requests, options=options)
    over = [one if one.reason in FINISHED else one._replace(ttft=float("inf")) for one in report.measured]
    return Result(job, tuple(one.ttft for one in over), tuple(np.nan_to_num([one.worst_tpot for one in over]).tolist()))


def arrivals(job: Job) -> Workload | list[Arrival]:
    ttft, tpot = job.slo
    if job.trace:
        return load_trace(job.trace, slo=SLO(ttft, tpot), num_prompts=job.requests)
    drawn = NAMED[f"fairbatching-{job.workload}"]
    assert isinstance(drawn, Workload)
    return replace(drawn, ttft=ttft, tpot=tpot)


def rates(workload: str, model: str, shares: Iterable[float], instances: int = 1) -> list[float]:
    """Shares of the rate at which prompts of the mean length alone keep the instances busy. Requests per second."""
    truth = load_yaml(preset("latency", model), Latency).solve()
    mean = {"burstgpt": 688.0, "qwen": 892.0, "azure": 1604.0}[workload]
    alone = float(truth.prefill_times(np.array([mean]), np.zeros(1), 8192)[0])
    return [round(share * instances / alone, 2) for share in shares]


Map = Callable[[Sequence[Job]], list[Result]]


def table3(every: Map, args: argparse.Namespace) -> list[list[object]]:
    paper = {
        "burstgpt": (1.55, 1.55, 1.81, 2.71),
        "qwen": (1.22, 1.13, 1.51, 2.56),
        "azure": (0.70, 0.77, 0.84, 1.36),
        "overall": (1.09, 1.10, 1.32, 2.11),
    }
    jobs = [
        Job(system, workload, rate, args.requests, model, SLOS[workload])
        for model in (H20, A800)
        for workload in SLOS
        for system in (*MAIN.values(), *TUNED[1:])
        for rate in rates(workload, model, SHARES)
    ]
    found = every(jobs)

    def peak(model: str, workload: str, system: str) -> float:
        here = [r for r in found if (r.job.model, r.job.workload) == (model, workload)]
        return max(r.effective() for r in here if r.job.system in (TUNED if system == "sarathi" else (system,)))

    rows: list[list[object]] = []
    for workload in SLOS:
        peaks = [[peak(model, workload, system) for system in MAIN.values()] for model in (H20, A800)]
        means = [mean(column) for column in zip(*peaks, strict=True)]
        rows += [[workload, H20, *peaks[0]], [workload, A800, *peaks[1]], [workload, "mean", *means]]
        rows.append([workload, "paper, mean of 4 models", *paper[workload]])
    overall = [mean(row[2 + i] for row in rows if row[1] == "mean") for i in range(len(MAIN))]  # type: ignore[misc]
    rows += [["overall", "mean", *overall], ["overall", "paper, mean of 4 models", *paper["overall"]]]
    best = max(overall[:2])
    gains = [f"{100 * (one / best - 1):+.0f} %" for one in overall]
    rows += [
        ["over the better baseline", "ours", *gains],
        ["over the better baseline", "paper", "-1 %", "0 %", "+20 %", "+90 %"],
    ]
    print_table("Table 3: peak effective requests/s", ["workload", "model", *MAIN], rows)
    return rows


def traces(every: Map, args: argparse.Namespace) -> list[list[object]]:
    """Needs `--trace`: the columns of Table 3 on real arrivals and lengths, stretched to each rate."""
    jobs = [
        Job(system, workload, rate, args.requests, H20, SLOS[workload], trace=path)
        for workload, path in args.trace.items()
        for system in MAIN.values()
        for rate in rates(workload, H20, SHARES[:3])
    ]
    found = every(jobs)
    rows: list[list[object]] = []
    for workload in args.trace:
        for rate in rates(workload, H20, SHARES[:3]):
            here = [r for r in found if (r.job.workload, r.job.rate) == (workload, rate)]
            rows.append([workload, rate, *(r.effective() for r in here)])
    print_table("Effective requests/s on traces, Qwen3-14B on H20", ["workload", "requests/s", *MAIN], rows)
    return rows


def mean(values: Iterable[float]) -> float:
    """Geometric."""
    logs = [log(value) for value in values]
    return exp(sum(logs) / len(logs))


def table4(every: Map, args: argparse.Namespace) -> list[list[object]]:
    paper = {
        "vLLM": (212, 1061, 1842, 26, 256, 614),
        "Sarathi": (377, 2455, 4585, 29, 46, 49),
        "FB": (213, 1053, 1998, 27, 50, 50),
        "FB-PAB": (198, 500, 504, 23, 50, 50),
    }
    found = every([Job(system, "qwen", 2.5, 1000) for system in MAIN.values()])
    rows: list[list[object]] = []
    for name, result in zip(MAIN, found, strict=True):
        served = np.isfinite(result.ttft)
        ours = [
            round(1e3 * float(value))
            for column in (result.ttft, result.tpot)
            for value in np.percentile(np.array(column)[served], (50, 95, 99))
        ]
        rows += [[name, "ours", *ours, round(result.effective(), 2)], [name, "paper", *paper[name], None]]
    titles = ["system", "", *(f"{what} P{p}" for what in ("TTFT", "TPOT") for p in (50, 95, 99)), "effective/s"]
    print_table("Table 4: ms at 2.5 requests/s, Qwen3-14B on H20, QwenTrace", titles, rows)
    return rows


TTFTS, TPOTS = (0.5, 1.0, 1.5, 2.0), (0.05, 0.1, 0.15, 0.2)
GAINS = {
    "FB": ((15.4, 7.5, 5.6, 6.1), (11.6, 8.1, 3.9, 2.8), (8.3, 4.8, 2.6, 0.6), (6.8, 4.5, 1.5, -0.4)),
    "FB-PAB": ((112.6, 91.8, 84.9, 78.3), (76.5, 64.9, 54.7, 55.5), (63.7, 52.1, 36.2, 32.5), (59.9, 45.9, 26.5, 24.8)),
}


def table5(every: Map, args: argparse.Namespace) -> list[list[object]]:
    """vLLM sees no SLO, Sarathi and FairBatching (one TTFT for all) only the TPOT: they run once for each of those.
    What FB-PAB keeps only grows with the rate (Figure 7): its peak is at the highest."""
    some = rates("qwen", H20, (0.35, 0.5, 0.65, 0.75))
    jobs = [Job("vllm", "qwen", rate, args.requests) for rate in some]
    for system in (MAIN["Sarathi"], MAIN["FB"]):
        jobs += [Job(system, "qwen", rate, args.requests, slo=(0.5, tpot)) for tpot in TPOTS for rate in some]
    jobs += [Job(MAIN["FB-PAB"], "qwen", some[-1], args.requests, slo=(ttft, tpot)) for ttft in TTFTS for tpot in TPOTS]
    found = every(jobs)

    def peak(system: str, ttft: float, tpot: float) -> float:
        chosen = [r for r in found if r.job.system == system and (system == "vllm" or r.job.slo[1] == tpot)]
        if system == MAIN["FB-PAB"]:
            chosen = [r for r in chosen if r.job.slo[0] == ttft]
        return max(r.effective((ttft, tpot)) for r in chosen)

    rows: list[list[object]] = []
    for name, published in GAINS.items():
        for ttft, line in zip(TTFTS, published, strict=True):
            ours = []
            for tpot in TPOTS:
                best = max(peak("vllm", ttft, tpot), peak(MAIN["Sarathi"], ttft, tpot))
                ours.append(f"{100 * (peak(MAIN[name], ttft, tpot) / best - 1):+.1f} %")
            rows += [[name, ttft, "ours", *ours], [name, ttft, "paper", *(f"{gain:+.1f} %" for gain in line)]]
    print_table(
        "Table 5: gain in peak effective requests/s over the better of vLLM and Sarathi",
        ["system", "TTFT SLO s", "", *(f"TPOT {1000 * tpot:.0f} ms" for tpot in TPOTS)],
        rows,
    )
    return rows


PARTS = {
    "Sarathi": ("sarathi", None),
    "Sarathi, smaller budget": (TUNED[1], None),
    "Sarathi, larger budget": (TUNED[2], None),
    "vLLM": ("vllm", "+9.2 % over Sarathi"),
    "vLLM, one batch for both (v1)": ("sarathi:tokens=8192", None),
    "FB-FB (fixed budget)": ("fairbatching:budget=fixed", "+15.1 % over vLLM"),
    "FB-TB (token budget)": ("fairbatching:budget=tokens", "+7.9 % over FB-FB"),
    "FB": ("fairbatching", "+2.4 % over FB-TB"),
    "FB-PAB": ("fairbatching/pab:refuse", "+52.1 % over FB"),
    "FB anchored at the arrival": ("fairbatching:anchor=arrival", None),
    "FB with all of the budget": ("fairbatching:margin=1.0", None),
    "FB, largest on-time set first": ("fairbatching:on_time_set", None),
}


def breakdown(every: Map, args: argparse.Namespace) -> list[list[object]]:
    some = rates("qwen", H20, SHARES)
    found = every([Job(system, "qwen", rate, args.requests) for system, _ in PARTS.values() for rate in some])
    rows: list[list[object]] = []
    for name, (system, paper) in PARTS.items():
        effective = [result.effective() for result in found if result.job.system == system]
        rows.append([name, *effective, max(effective), paper])
    print_table(
        "Figure 7: effective requests/s, Qwen3-14B on H20, QwenTrace",
        ["system", *(f"at {rate}/s" for rate in some), "peak", "paper"],
        rows,
    )
    return rows


CLUSTERS = {
    "requests + vLLM": "vllm/none/fewest_requests",
    "requests + Sarathi": "sarathi/none/fewest_requests",
    "requests + FB": "fairbatching/none/fewest_requests",
    "PAB + FB": "fairbatching/none/prefill_budget",
}


def dp8(every: Map, args: argparse.Namespace) -> list[list[object]]:
    paper = {"qwen": (54.3, 34.9), "burstgpt": (45.3, 16.2), "azure": (38.3, 7.7)}
    shares = (0.5, 0.65)
    jobs = [
        Job(system, workload, rate, 4 * args.requests, H20, SLOS[workload], 8)
        for workload in paper
        for system in CLUSTERS.values()
        for rate in rates(workload, H20, shares, 8)
    ]
    found = every(jobs)
    rows: list[list[object]] = []
    for workload, (overall, balancer) in paper.items():
        peaks = [
            max(r.effective() for r in found if (r.job.workload, r.job.system) == (workload, system))
            for system in CLUSTERS.values()
        ]
        gains = peaks[3] / max(peaks[:2]) - 1, peaks[3] / peaks[2] - 1
        rows.append([workload, *peaks, *(f"{100 * gain:+.1f} %" for gain in gains), f"+{overall} %", f"+{balancer} %"])
    titles = ["over the better baseline", "over requests + FB"]
    print_table(
        "Figure 8: peak effective requests/s, 8 x Qwen3-14B on H20",
        ["workload", *CLUSTERS, *titles, *(f"paper: {title}" for title in titles)],
        rows,
    )
    return rows


TABLES = {one.__name__: one for one in (table3, table4, table5, breakdown, dp8, traces)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--requests", type=int, default=400, help="of each simulation [%(default)s]")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes [all cores]")
    parser.add_argument(
        "--trace",
        action="append",
        default=[],
        metavar="WORKLOAD=FILE",
        help="for traces: burstgpt or azure, and the file",
    )
    common.add_output(parser, "fairbatching")
    args = parser.parse_args()
    args.trace = dict(one.partition("=")[::2] for one in args.trace)

    def every(jobs: Sequence[Job]) -> list[Result]:
        with ProcessPoolExecutor(args.jobs) as pool, progress.bar(args.table) as update:
            results: list[Result] = []
            for result in pool.map(run, jobs):
                results.append(result)
                update(len(results), len(jobs))
            return results

    rows = TABLES[args.table](every, args)
    args.output = args.output.with_name(args.output.name.replace("fairbatching", f"fairbatching-{args.table}"))
    args.trace = {workload: Path(path).name for workload, path in args.trace.items()}
    common.save(args, {"rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
