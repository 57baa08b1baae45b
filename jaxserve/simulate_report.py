"""What `jaxserve simulate` shows and writes: a table, JSON, CSV and plots."""

from __future__ import annotations

import csv
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy

from jaxserve.report.origin import commit
from jaxserve.report.table import print_table
from jaxserve.sched.metrics import CLASSES, GOAL, Summary, goodput_rate
from jaxserve.sched.sim import Report
from jaxserve.version import __version__

Value = Callable[[Summary], float]


def _of_length(name: str) -> Value:
    return lambda summary: summary.by_length[name].attained


SHARES: dict[str, Value] = {
    "both": lambda s: s.attained,
    "TTFT": lambda s: s.ttft_attained,
    "TPOT": lambda s: s.tpot_attained,
    "tokens": lambda s: s.token_weighted,
    **{name: _of_length(name) for name, _ in CLASSES},
}
FIGURES: dict[str, Value] = {
    "tok/s": lambda s: s.median_speed,
    "all": lambda s: s.output_throughput,
}
FLAT: dict[str, Value] = {  # columns of the CSV
    "attained": SHARES["both"],
    "ttft_attained": SHARES["TTFT"],
    "tpot_attained": SHARES["TPOT"],
    "token_weighted": SHARES["tokens"],
    **{f"attained_{name}": SHARES[name] for name, _ in CLASSES},
    "median_speed_tok_s": lambda s: s.median_speed,
    "output_throughput_tok_s": lambda s: s.output_throughput,
    "request_goodput_req_s": lambda s: s.request_goodput,
    "ttft_p50_s": lambda s: s.ttft.p50,
    "ttft_p99_s": lambda s: s.ttft.p99,
    "tpot_p50_s": lambda s: s.tpot.p50,
    "tpot_p99_s": lambda s: s.tpot.p99,
    "worst_tpot_p99_s": lambda s: s.worst_tpot.p99,
    "window_tpot_p99_s": lambda s: s.window_tpot.p99,
    "largest_gap_p99_s": lambda s: s.largest_gap.p99,
}

Cells = dict[tuple[str, float], list[Report]]


def _cells(reports: Sequence[Report]) -> Cells:
    """Reports by policy and rate; what is left inside a cell are seeds."""
    cells: Cells = {}
    for report in reports:
        cells.setdefault((report.policy, report.rate), []).append(report)
    return cells


def _mean(reports: Sequence[Report], value: Value) -> float:
    return fmean(value(report.summary) for report in reports)


def _percent(share: float) -> str:
    return "–" if share != share else f"{100 * share:.1f}"


def print_report(title: str, reports: Sequence[Report]) -> None:
    """Attainment in percent: of both objectives and of each, by prompt length, weighted by prompt tokens; tokens per
    second of the median request and of all together. Means over seeds, narrow enough for 80 columns."""
    rows: list[Sequence[object]] = []
    for (policy, rate), cell in sorted(_cells(reports).items(), key=lambda item: item[0][1]):
        rows.append(
            [f"{rate:.3g}", policy]
            + [_percent(_mean(cell, value)) for value in SHARES.values()]
            + [f"{_mean(cell, value):.1f}" for value in FIGURES.values()]
        )
    seeds = len({report.seed for report in reports})
    count = reports[0].summary.count
    print_table(
        f"{title}: SLO attainment in % of {count} requests" + (f", mean of {seeds} seeds" if seeds > 1 else ""),
        ["QPS", "policy", *SHARES, *FIGURES],
        rows,
    )
    for policy, best in goodput(reports).items():
        print(f"goodput of {policy}: " + (f"{best:.3g} requests/s" if best else f"no rate here reaches {GOAL:.0%}"))


def goodput(reports: Sequence[Report]) -> dict[str, float | None]:
    """Per policy the highest rate whose attainment, as a mean over seeds, reaches 90 %."""
    cells = _cells(reports)
    found: dict[str, float | None] = {}
    for policy in dict.fromkeys(report.policy for report in reports):
        rates = [rate for name, rate in cells if name == policy]
        found[policy] = goodput_rate(rates, [_mean(cells[policy, rate], SHARES["both"]) for rate in rates])
    return found


def write_report(out: Path, title: str, settings: Mapping[str, Any], reports: Sequence[Report]) -> list[Path]:
    """Write results.json, results.csv and plots into `out`; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    results = [
        {
            "policy": one.policy,
            "qps": one.rate,
            "seed": one.seed,
            "busy": list(one.busy),
            "ended": one.ended,
            "counters": asdict(one.counters),
            **one.summary.as_dict(),
        }
        for one in reports
    ]
    document = {
        "title": title,
        "jaxserve": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "settings": settings,
        "goodput": goodput(reports),
        "results": results,
    }
    paths = [out / "results.json", out / "results.csv"]
    paths[0].write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    with paths[1].open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["policy", "qps", "seed", "requests", *FLAT])
        for one in reports:
            values = [f"{value(one.summary):.6g}" for value in FLAT.values()]
            writer.writerow([one.policy, f"{one.rate:g}", one.seed, one.summary.count, *values])
    return paths + (_curves if len({one.rate for one in reports}) > 1 else _distributions)(out, title, reports)


def _curves(out: Path, title: str, reports: Sequence[Report]) -> list[Path]:
    """The paper's Figures 3 to 6, and what counting requests alone hides."""
    from jaxserve.report import plot  # matplotlib takes a second

    def panel(name: str, ylabel: str, value: Value, scale: float = 100.0) -> plot.Panel:
        lines: dict[str, plot.Series] = {}
        cells = _cells(reports)
        for policy in dict.fromkeys(one.policy for one in reports):
            rates = sorted(rate for other, rate in cells if other == policy)
            spread = [[scale * value(one.summary) for one in cells[policy, rate]] for rate in rates]
            lines[policy] = plot.Series(rates, [*map(fmean, spread)], [*map(min, spread)], [*map(max, spread)])
        share = scale == 100.0
        return plot.Panel(name, "QPS", ylabel, lines, (0, 102) if share else None, 100 * GOAL if share else None)

    paper = [
        panel("End-to-end attainment", "% of requests", SHARES["both"]),
        panel("TTFT attainment", "% of requests", SHARES["TTFT"]),
        panel("TPOT attainment", "% of requests", SHARES["TPOT"]),
        panel("Decode speed of the median request", "tokens/s", FIGURES["tok/s"], 1.0),
    ]
    hidden = [panel(f"Prompts {name}", "% attained", SHARES[name]) for name, _ in CLASSES]
    hidden += [
        panel("Weighted by prompt tokens", "% attained", SHARES["tokens"]),
        panel("All requests together", "tokens/s", FIGURES["all"], 1.0),
    ]
    return [
        plot.lines(out / "attainment.png", paper, title=title),
        plot.lines(out / "by-length.png", hidden, title=title, columns=3),
    ]


def _distributions(out: Path, title: str, reports: Sequence[Report]) -> list[Path]:
    """At one rate there is no curve: distributions over requests instead."""
    from jaxserve.report import plot

    def of(name: str) -> dict[str, list[float]]:
        values: dict[str, list[float]] = {}
        for one in reports:
            values.setdefault(one.policy, []).extend(getattr(each, name) for each in one.measured)
        return values

    return [
        plot.cdf(out / "ttft.png", of("ttft"), title=title, xlabel="TTFT, s"),
        plot.cdf(out / "tpot.png", of("tpot"), title=title, xlabel="mean TPOT, s"),
    ]
