"""The plots of `jaxserve simulate`, like the papers' figures: curves over rates, goodput bars, CDFs."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from pathlib import Path
from statistics import fmean

from jaxserve.cli.simulate.results import FIGURES, SHARES, VALUES, Results, Value
from jaxserve.report import plot
from jaxserve.sched.metrics import CLASSES

TICKS = 8  # most labels of the axis of rates


def draw(out: Path, results: Results) -> list[Path]:
    """Plot curves and bars over several rates, and distributions at the middle rate; return the paths."""
    rates = sorted({report.rate for report in results.reports})
    several = len(rates) > 1
    return [*(_curves(out, results) if several else []), *_distributions(out, results, rates[len(rates) // 2])]


def _curves(out: Path, results: Results) -> list[Path]:
    """Plot Kairos's Figures 3 to 6, attainment by length and by tokens, and goodput."""
    asked = {"both": "Both objectives", "worst": "TTFT and worst TPOT", "window": "TTFT and TPOT over 10 tokens"}
    name = asked.get(results.attain, "Both objectives")
    paper = [
        _panel(results, name, "% of requests", VALUES[results.attain if results.attain in asked else "both"]),
        _panel(results, "TTFT attainment", "% of requests", VALUES["ttft"]),
        _panel(results, "TPOT attainment", "% of requests", VALUES["tpot"]),
        _panel(results, "Decode speed of the median request", "tokens/s", FIGURES["tok/s"], 1.0),
    ]
    if results.bounds:
        bound = results.bound_at()
        line = plot.Series([*bound], [100 * share for share in bound.values()], dashed=True)
        paper[0] = replace(paper[0], series={**paper[0].series, "bound": line})
    hidden = [_panel(results, f"Prompts {length}", "% attained", SHARES[length]) for length, _ in CLASSES]
    hidden += [
        _panel(results, "Weighted by prompt tokens", "% attained", VALUES["tokens"]),
        _panel(results, "All requests together", "tokens/s", FIGURES["all"], 1.0),
    ]
    lowest = min(report.rate for report in results.reports)
    bars = {policy: lowest if rate is None else rate for policy, rate in results.goodput.items()}
    return [
        plot.lines(out / "attainment.png", paper, title=results.title),
        plot.lines(out / "by-length.png", hidden, title=results.title, columns=3),
        plot.bars(
            out / "goodput.png",
            bars,
            title=results.title,
            ylabel=f"requests/s at {results.goal:.0%}",
            level=results.goodput_bound,
            level_name="bound",
            at_least=results.at_least,
            below=results.below,
        ),
    ]


def _panel(results: Results, name: str, ylabel: str, value: Value, scale: float = 100.0) -> plot.Panel:
    lines: dict[str, plot.Series] = {}
    cells = results.cells()
    for policy in results.policies:
        rates = sorted(rate for other, rate in cells if other == policy)
        spread = [[scale * value(report.summary) for report in cells[policy, rate]] for rate in rates]
        lines[policy] = plot.Series(rates, [*map(fmean, spread)], [*map(min, spread)], [*map(max, spread)])
    share = scale == 100.0
    ends = (0, 102) if share else None
    rates = sorted({rate for _, rate in cells})
    level = 100 * results.goal if share else None
    return plot.Panel(name, "QPS", ylabel, lines, ends, level, ticks=rates[:: -(-len(rates) // TICKS)])


def _distributions(out: Path, results: Results, rate: float) -> list[Path]:
    """Plot distributions over requests at one rate; after a search, at each policy's goodput."""

    def of(name: str) -> dict[str, list[float]]:
        values: dict[str, list[float]] = {}
        for report in results.reports:
            if report.rate == (results.goodput.get(report.policy) if results.searched else rate):
                values.setdefault(report.policy, []).extend(getattr(each, name) for each in report.measured)
        return values

    slo = results.slo
    title = f"{results.title}, " + ("each at its goodput" if results.searched else f"{rate:.3g} requests/s")
    values = (
        ("ttft", of("ttft"), "TTFT", slo.ttft),
        ("tpot", of("tpot"), "mean TPOT", slo.tpot),
        ("tbt", of("largest_gap"), "largest gap between two tokens", slo.tbt),
    )
    return [
        plot.cdf(out / f"{file}.png", rates, title=title, xlabel=f"{label}, s", level=level, log_x=True)
        for file, rates, label, level in values
        if any(isfinite(value) for each in rates.values() for value in each)
    ]
