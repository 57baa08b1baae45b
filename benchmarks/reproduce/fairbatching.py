"""Reproduce FairBatching's tables and figures (arXiv 2510.14392) in the simulator.

`python benchmarks/reproduce/fairbatching.py all` writes docs/research/fairbatching.md and its JSON. Tables of real
traces need their files: `--trace burstgpt=FILE --trace azure=FILE`. A peak is the maximum over a few rates, which are
given as shares of the rate that prefill alone would allow.
"""

from __future__ import annotations

import argparse
from functools import cache

import fairbatching_detail
import page
from fairbatching_runs import (
    H20,
    MAIN,
    MODELS,
    SHARES,
    SLOS,
    TUNED,
    WORKLOADS,
    Job,
    Result,
    every,
    mean,
    rates,
)
from page import Table

from jaxserve.report import plot

REQUESTS = 200  # per simulation
SINGLE = SHARES[:3]  # rates of Table 3 and Figure 5


@cache
def single_node(jobs: int, requests: int) -> dict[Job, Result]:
    """Simulate the cases of Table 3 and Figure 5."""
    cases = [
        Job(system, workload, rate, requests, model, SLOS[workload])
        for model in MODELS.values()
        for workload in WORKLOADS
        for system in (*MAIN.values(), TUNED[1])
        for rate in rates(workload, model, SINGLE)
    ]
    return {result.job: result for result in every(argparse.Namespace(jobs=jobs), cases)}


def effective(args: argparse.Namespace, model: str, workload: str, system: str) -> list[float]:
    """Return effective requests/s by rate; for Sarathi, of the better of two budgets (the third is in Figure 7)."""
    count = args.requests or REQUESTS
    found = single_node(args.jobs, count)
    return [
        max(
            found[Job(one, workload, rate, count, model, SLOS[workload])].effective()
            for one in (TUNED[:2] if system == "sarathi" else (system,))
        )
        for rate in rates(workload, model, SINGLE)
    ]


def table3(args: argparse.Namespace) -> Table:
    paper = {
        "burstgpt": (1.55, 1.55, 1.81, 2.71),
        "qwen": (1.22, 1.13, 1.51, 2.56),
        "azure": (0.70, 0.77, 0.84, 1.36),
        "overall": (1.09, 1.10, 1.32, 2.11),
    }
    rows: list[list[object]] = []
    means = []
    for workload, name in WORKLOADS.items():
        peaks = [[max(effective(args, model, workload, one)) for one in MAIN.values()] for model in MODELS.values()]
        means.append([mean(column) for column in zip(*peaks, strict=True)])
        rows += [[name, label, *peak] for label, peak in zip(MODELS, peaks, strict=True)]
        rows += [[name, "mean", *means[-1]], [name, "paper, mean", *paper[workload]]]
    overall = [mean(column) for column in zip(*means, strict=True)]
    gains = [f"{100 * (one / max(overall[:2]) - 1):+.0f} %" for one in overall]
    rows += [
        ["all", "mean", *overall],
        ["all", "paper, mean", *paper["overall"]],
        ["over the better baseline", "ours", *gains],
        ["over the better baseline", "paper", "-1 %", "0 %", "+20 %", "+90 %"],
    ]
    return Table("Table 3: peak effective requests/s", ["workload", "model", *MAIN], rows)


def figure5(args: argparse.Namespace) -> Table:
    """Make Figure 5: effective requests/s by rate, for every model and workload."""
    rows, panels, data = [], [], {}
    for workload, name in WORKLOADS.items():
        for label, model in MODELS.items():
            x = rates(workload, model, SINGLE)
            curves = {system: effective(args, model, workload, policy) for system, policy in MAIN.items()}
            cells = [", ".join(f"{one:.2f}" for one in curve) for curve in curves.values()]
            rows.append([name, label, ", ".join(f"{one:.2f}" for one in x), *cells])
            data[f"{name} | {label}"] = {"rate": x, **curves}
            lines = {system: plot.Series(x, curve) for system, curve in curves.items()}
            panels.append(plot.Panel(f"{name}, {label}", "requests/s", "effective/s", lines))
    page.picture("fairbatching-figure5.png", panels, 4)
    return Table("Figure 5: effective requests/s by rate", ["workload", "model", "requests/s", *MAIN], rows, data)


TTFTS, TPOTS = (0.5, 1.0, 1.5, 2.0), (0.05, 0.1, 0.15, 0.2)
GAINS = {
    "FB": ((15.4, 7.5, 5.6, 6.1), (11.6, 8.1, 3.9, 2.8), (8.3, 4.8, 2.6, 0.6), (6.8, 4.5, 1.5, -0.4)),
    "FB-PAB": ((112.6, 91.8, 84.9, 78.3), (76.5, 64.9, 54.7, 55.5), (63.7, 52.1, 36.2, 32.5), (59.9, 45.9, 26.5, 24.8)),
}


def table5(args: argparse.Namespace) -> Table:
    """Make Table 5: gains by TTFT and TPOT objective.

    vLLM ignores SLOs, and Sarathi and FairBatching depend only on the TPOT, so they run once per value. FB-PAB's
    effective rate only grows with the rate (Figure 7), so its peak is at the highest one.
    """
    some, count = rates("qwen", H20, (0.35, 0.5, 0.65, 0.75)), args.requests or REQUESTS
    jobs = [Job("vllm", "qwen", rate, count) for rate in some]
    for system in (MAIN["Sarathi"], MAIN["FB"]):
        jobs += [Job(system, "qwen", rate, count, slo=(0.5, tpot)) for tpot in TPOTS for rate in some]
    jobs += [Job(MAIN["FB-PAB"], "qwen", some[-1], count, slo=(ttft, tpot)) for ttft in TTFTS for tpot in TPOTS]
    found = every(args, jobs)

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
                ours.append(100 * (peak(MAIN[name], ttft, tpot) / best - 1))
            cells = [f"{one:+.1f} ({there:+.1f})" for one, there in zip(ours, line, strict=True)]
            rows.append([name, f"{ttft:g} s", *cells])
    titles = ["system", "TTFT SLO", *(f"TPOT {1000 * tpot:.0f} ms, % (paper)" for tpot in TPOTS)]
    return Table("Table 5: gain in peak effective requests/s over the better of vLLM and Sarathi", titles, rows)


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
    "FB with all of the budget": ("fairbatching:use=1.0", None),
    "FB, largest on-time set first": ("fairbatching:on_time_set", None),
}
OVER = {"vLLM": "Sarathi", "FB-FB (fixed budget)": "vLLM", "FB-TB (token budget)": "FB-FB (fixed budget)"}
OVER |= {"FB": "FB-TB (token budget)", "FB-PAB": "FB", "FB, largest on-time set first": "FB"}


def breakdown(args: argparse.Namespace) -> Table:
    """Make Figure 7: the contribution of each part."""
    some, count = rates("qwen", H20, SHARES), args.requests or REQUESTS
    found = every(args, [Job(system, "qwen", rate, count) for system, _ in PARTS.values() for rate in some])
    peaks: dict[str, float] = {}
    rows: list[list[object]] = []
    for name, (system, paper) in PARTS.items():
        values = [result.effective() for result in found if result.job.system == system]
        peaks[name] = max(values)
        if name.startswith("Sarathi,"):  # the paper tunes Sarathi's budget
            peaks["Sarathi"] = max(peaks["Sarathi"], peaks[name])
        gain = f"{100 * (peaks[name] / peaks[OVER[name]] - 1):+.1f} % over {OVER[name]}" if name in OVER else None
        rows.append([name, *values, max(values), gain, paper])
    titles = ["system", *(f"at {rate}/s" for rate in some), "peak", "ours", "paper"]
    return Table("Figure 7: effective requests/s, Qwen3-14B on H20, QwenTrace", titles, rows)


CLUSTERS = {
    "requests + vLLM": "vllm/none/fewest_requests",
    "requests + Sarathi": "sarathi/none/fewest_requests",
    "requests + FB": "fairbatching/none/fewest_requests",
    "PAB + FB": "fairbatching/none/prefill_budget",
}


def dp8(args: argparse.Namespace) -> Table:
    """Make Figure 8: eight instances behind a load balancer."""
    paper = {"qwen": (54.3, 34.9), "burstgpt": (45.3, 16.2), "azure": (38.3, 7.7)}
    jobs = [
        Job(system, workload, rate, args.requests or 2 * REQUESTS, H20, SLOS[workload], 8)
        for workload in paper
        for system in CLUSTERS.values()
        for rate in rates(workload, H20, (0.5, 0.65), 8)
    ]
    found = every(args, jobs)
    rows: list[list[object]] = []
    for workload, (overall, balancer) in paper.items():
        peaks = [
            max(r.effective() for r in found if (r.job.workload, r.job.system) == (workload, system))
            for system in CLUSTERS.values()
        ]
        gains = peaks[3] / max(peaks[:2]) - 1, peaks[3] / peaks[2] - 1
        cells = (f"{100 * gains[0]:+.1f} (+{overall})", f"{100 * gains[1]:+.1f} (+{balancer})")
        rows.append([WORKLOADS[workload], *peaks, *cells])
    titles = ["workload", *CLUSTERS, "over the better baseline, % (paper)", "over requests + FB, % (paper)"]
    return Table("Figure 8: peak effective requests/s, 8 x Qwen3-14B on H20", titles, rows)


def traces(args: argparse.Namespace) -> Table | None:
    """Make Table 3 on real arrivals and lengths, stretched to each rate. Needs `--trace`."""
    if not args.trace:
        print("traces: skipped, because --trace is not given")
        return None
    files = dict(args.trace)
    some = {workload: rates(workload, H20, SHARES[:3]) for workload in files}
    jobs = [
        Job(system, workload, rate, args.requests or REQUESTS, H20, SLOS[workload], trace=path)
        for workload, path in files.items()
        for rate in some[workload]
        for system in MAIN.values()
    ]
    values = iter([result.effective() for result in every(args, jobs)])
    rows = [[WORKLOADS[one], rate, *(next(values) for _ in MAIN)] for one in files for rate in some[one]]
    return Table("Effective requests/s on traces, Qwen3-14B on H20", ["trace", "requests/s", *MAIN], rows)


MAKERS = (table3, figure5, table5, breakdown, dp8, *fairbatching_detail.MAKERS, traces)


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--trace", action="append", default=[], metavar="WORKLOAD=FILE", type=lambda text: text.partition("=")[::2],
        help="trace file of burstgpt or azure, for the tables `traces` and `arrival_counts`",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    raise SystemExit(page.run(__doc__, "fairbatching", MAKERS, flags()))
