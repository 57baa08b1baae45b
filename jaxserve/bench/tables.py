"""The tables that a run prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.bench import result
from jaxserve.bench.drive import Probe
from jaxserve.report.table import print_table

TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
    "client_lag": "client's own delay",
}
COMPARED = (  # figures of runs that are repeated
    "request_throughput",
    "output_throughput",
    "median_ttft_ms",
    "median_tpot_ms",
    "slo_attainment",
    "request_goodput",
)


def show(title: str, figures: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> None:
    """Print latencies, throughput, attainment, and a row for each class."""
    names = ["mean", "median", "std", *map(result.percentile_name, percentiles)]
    rows = [
        [TITLES[metric], *(float(figures[f"{name}_{metric}_ms"]) for name in names)]
        for metric in (*metrics, "client_lag")
    ]
    print_table(f"{title}, ms", ["", *names], rows)
    facts = [
        ["requests completed / failed", f"{figures['completed']} / {figures['failed']}"],
        ["duration, s", figures["duration"]],
        ["requests per s, offered / done", f"{figures['request_rate']} / {figures['request_throughput']:.4g}"],
        ["input / output tokens", f"{figures['total_input_tokens']} / {figures['total_output_tokens']}"],
        [
            "output tokens per s, mean / peak",
            f"{figures['output_throughput']:.4g} / {figures['max_output_tokens_per_s']}",
        ],
        ["most requests at once", figures["max_concurrent_requests"]],
    ]
    if "slo_attainment" in figures:
        facts.append(["on time, share of requests sent", figures["slo_attainment"]])
        facts.append(["on time per s (request_goodput)", figures["request_goodput"]])
        facts += [[f"  {m} kept", share] for m, share in figures["slo_attainment_by_metric"].items()]
    print_table("", ["", ""], facts)
    if "by_class" in figures:
        _show_classes(figures["by_class"], result.percentile_name(percentiles[-1] if percentiles else 99.0))


def _show_classes(classes: Mapping[str, Mapping[str, Any]], high: str) -> None:
    rows: list[list[object]] = []
    for name, own in classes.items():
        times = [own.get(f"{part}_{metric}_ms") for metric in ("ttft", "tpot", "tbt") for part in ("p50", high)]
        objectives = " ".join(f"{m}:{'varies' if v is None else f'{v:g}'}" for m, v in own["slos_ms"].items())
        shares = " ".join(f"{metric}:{share:.3g}" for metric, share in own["slo_attainment_by_metric"].items())
        requests = f"{own['requests']} / {own['failed']}"
        rows.append([name, own["tier"], objectives or "–", requests, own["slo_attainment"], shares or "–", *times])
    columns = ["class", "tier", "objectives, ms", "requests / failed", "on time", "by objective"]
    columns += [f"{metric} {part}" for metric in ("TTFT", "TPOT", "TBT") for part in ("p50", high)]
    print_table("by class; times in ms, TBT is a request's largest gap", columns, rows)


def show_runs(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print the main figures of repeated runs, with their mean and standard deviation."""
    rows: list[list[object]] = []
    for name in COMPARED:
        values = [float(run[name]) for run in runs if run.get(name) is not None]
        if len(values) == len(runs):
            rows.append([name, *values, float(np.mean(values)), float(np.std(values, ddof=1))])
    print_table(f"{len(runs)} runs", ["", *map(str, range(1, len(runs) + 1)), "mean", "std"], rows)


def mean_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of every number of several results, and the other values of the first one."""
    means: dict[str, Any] = {}
    for name, value in runs[0].items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        values = [run[name] for run in runs if isinstance(run.get(name), int | float)]
        means[name] = float(np.mean(values)) if number and len(values) == len(runs) else value
    return means


def show_probes(goal: float, peak: float, probes: Sequence[Probe], tried: Sequence[Mapping[str, Any]]) -> None:
    """Print the rates that a search tried."""
    order = sorted(range(len(probes)), key=lambda i: probes[i].rate)
    table = [
        [probes[i].rate, probes[i].attainment, tried[i].get("p99_ttft_ms"), tried[i].get("p99_tpot_ms")] for i in order
    ]
    title = f"{goal:.0%} on time up to {peak:.4g} requests/s"
    print_table(title, ["requests/s", "on time", "p99 TTFT, ms", "p99 TPOT, ms"], table)
