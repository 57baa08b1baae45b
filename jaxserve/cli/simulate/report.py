"""The output of `jaxserve simulate`: tables, JSON and CSV; plots.py draws the plots."""

from __future__ import annotations

import csv
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy

from jaxserve.cli.simulate.results import (
    FIGURES,
    FLAT,
    PERCENTILES,
    SHARES,
    VALUES,
    Results,
    Value,
    of_class,
    of_spread,
)
from jaxserve.report.origin import commit
from jaxserve.report.table import print_table
from jaxserve.sched.instance.stats import Counters
from jaxserve.sched.metrics import GOAL, goodput_rate
from jaxserve.sched.sim import Report
from jaxserve.version import __version__

LEGEND = (
    "QPS: requests per second. both: requests that attain TTFT and TPOT; tokens: weighted by prompt tokens; <4K and so",
    "on: by prompt length. tok/s: decode speed of the median request; all: output tokens per second of all requests.",
)


def goodput(reports: Sequence[Report], attain: str = "both", goal: float = GOAL) -> dict[str, float | None]:
    """Return each policy's goodput: the highest rate such that it and all lower ones reach the goal.

    Attainment is the mean over seeds.
    """
    cells = Results("", reports, {}).cells()
    goodputs: dict[str, float | None] = {}
    for policy in dict.fromkeys(report.policy for report in reports):
        rates = [rate for name, rate in cells if name == policy]
        goodputs[policy] = goodput_rate(rates, [_mean(cells[policy, rate], VALUES[attain]) for rate in rates], goal)
    return goodputs


def print_report(results: Results) -> None:
    """Print attainment and latency tables, as means over seeds, for 80 columns.

    Attainment in percent: of both objectives and of each, by prompt length, weighted by prompt
    tokens, and by class. Throughput of the median request and of all together. After a search, only
    the rates that it found.
    """
    shown = list(_shown(results))
    seeds = len({report.seed for report in results.reports})
    mean = f", mean of {seeds} seeds" if seeds > 1 else ""
    count = results.reports[0].summary.count
    bound = results.bound_at()
    rows: list[Sequence[object]] = []
    for rate, policy, cell in shown:
        rows.append(
            [f"{rate:.3g}", policy]
            + [_percent(_mean(cell, value)) for value in SHARES.values()]
            + [f"{_mean(cell, value):.1f}" for value in FIGURES.values()]
        )
    rates = {rate for rate, _, _ in shown}
    rows += [[f"{rate:.3g}", "bound", _percent(share), *["–"] * 9] for rate, share in bound.items() if rate in rates]
    rows.sort(key=lambda row: float(str(row[0])))
    print_table(
        f"{results.title}: SLO attainment in % of {count} requests{mean}", ["QPS", "policy", *SHARES, *FIGURES], rows
    )
    classes = results.classes()
    if len(classes) > 1:
        by_class = [
            [f"{rate:.3g}", policy, *(_percent(_mean(cell, of_class(name))) for name in classes)]
            for rate, policy, cell in shown
        ]
        print_table("attainment by class, in %", ["QPS", "policy", *classes], by_class)
    _print_times(shown)
    print(*results.legend, *LEGEND, "", sep="\n")
    of = "" if results.attain == "both" else f" ({results.attain})"
    for policy, best in results.goodput.items():
        print(f"goodput of {policy}{of}: {_goodput(results, policy, best)}")
    if results.goodput_bound is not None:
        limit = (
            f"{results.goodput_bound:.3g} requests/s" if isfinite(results.goodput_bound) else "no rate that is known"
        )
        print(f"no policy reaches {results.goal:.0%} above {limit}")


def _goodput(results: Results, policy: str, best: float | None) -> str:
    """Return a policy's goodput in words: bounds as such, and rates that reach the goal above one that does not."""
    goal = f"{results.goal:.0%}"
    again = results.again(policy)
    if again:
        missed = min(rate for rate in results.attained(policy) if rate > (best or 0.0))
        upper = f"{best:.3g} requests/s" if best else f"below {missed:.3g} requests/s"
        rates = ", ".join(f"{rate:.3g}" for rate in again)
        return f"{upper} (misses {goal} at {missed:.3g}, though it reaches it at {rates})"
    if best:
        return f"{'at least ' * (policy in results.at_least)}{best:.3g} requests/s"
    return f"no rate {'here ' * (not results.searched)}reaches {goal}"


def _shown(results: Results) -> Iterator[tuple[float, str, list[Report]]]:
    for (policy, rate), cell in sorted(results.cells().items(), key=lambda item: item[0][1]):
        if not results.searched or rate == results.goodput.get(policy):
            yield rate, policy, cell


def _print_times(shown: Sequence[tuple[float, str, list[Report]]]) -> None:
    """Print latencies, busy shares, decision times and, if any, prefix cache hits.

    TTFT in seconds, time between tokens in milliseconds, decisions in microseconds.
    """
    rows, cached = [], [_cached(cell) for _, _, cell in shown]
    for rate, policy, cell in shown:
        busy = zip(*(report.busy for report in cell), strict=True)
        decisions = [report.decisions for report in cell if report.decisions is not None]
        took = [1e6 * fmean(getattr(decision, part) for decision in decisions) for part in ("p50", "p99") if decisions]
        rows.append(
            [f"{rate:.3g}", policy]
            + [f"{_mean(cell, of_spread('ttft', part)):.3g}" for part in PERCENTILES]
            + [
                f"{1e3 * _mean(cell, of_spread(each, p)):.3g}"
                for each in ("tpot", "largest_gap")
                for p in ("p50", "p99")
            ]
            + [" ".join(f"{100 * fmean(shares):.0f}" for shares in busy)]
            + ["/".join(f"{microseconds:.0f}" for microseconds in took)]
        )
    names = ["TTFT p50", "p95", "p99", "TPOT p50", "p99", "TBT p50", "p99", "busy", "decide"]
    title = (
        "TTFT in s, TPOT and TBT (largest gap) in ms\nbusy: % of the time, by instance; decide: processor time in µs, "
        "p50/p99"
    )
    if any(cached):
        names, title = [*names, "cached"], title + "; cached: % of the prompt tokens, found in a prefix cache"
        rows = [[*row, _percent(share)] for row, share in zip(rows, cached, strict=True)]
    print_table(title, ["QPS", "policy", *names], rows)


def _cached(reports: Sequence[Report]) -> float:
    """Return the share of looked-up prompt tokens that were found in a prefix cache."""
    counters = Counters.total(report.counters for report in reports)
    return counters.prefix_hits / max(1, counters.prefix_queries)


def _mean(reports: Sequence[Report], value: Value) -> float:
    return fmean(value(report.summary) for report in reports)


def _percent(share: float) -> str:
    return "–" if share != share else f"{100 * share:.1f}"


def write_report(out: Path, settings: Mapping[str, Any], results: Results) -> list[Path]:
    """Write results.json, results.csv and plots to `out`; return their paths."""
    from jaxserve.cli.simulate import plots  # importing matplotlib takes a second

    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "results.json", out / "results.csv"]
    text = json.dumps(_document(settings, results), indent=1, allow_nan=False)
    paths[0].write_text(text + "\n", encoding="utf-8")
    with paths[1].open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["policy", "qps", "seed", "requests", *FLAT])
        for report in results.reports:
            values = [f"{value(report.summary):.6g}" for value in FLAT.values()]
            writer.writerow([report.policy, f"{report.rate:g}", report.seed, report.summary.count, *values])
        for bound in results.bounds:
            writer.writerow(["bound", f"{bound.rate:g}", bound.seed, bound.bound.requests, f"{bound.bound.share:.6g}"])
    return paths + plots.draw(out, results)


def _document(settings: Mapping[str, Any], results: Results) -> dict[str, Any]:
    limit = results.goodput_bound
    return {
        "title": results.title,
        "jaxserve": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "settings": settings,
        "goal": {"share": results.goal, "of": results.attain, "searched": results.searched},
        "goodput": results.goodput,
        "reached_again": {policy: results.again(policy) for policy in results.policies},
        "goodput_bound": limit if limit is not None and isfinite(limit) else None,
        "bounds": [{"qps": bound.rate, "seed": bound.seed, **bound.bound._asdict()} for bound in results.bounds],
        "results": [
            {
                "policy": report.policy,
                "qps": report.rate,
                "seed": report.seed,
                "instances": list(report.instances),
                "busy": list(report.busy),
                "ended": report.ended,
                "prefix_hit_rate": _cached([report]),
                "decision_seconds": None if report.decisions is None else report.decisions._asdict(),
                "counters": asdict(report.counters),
                **report.summary.as_dict(),
            }
            for report in results.reports
        ],
    }
