"""The plot of a run: distributions of TTFT and TPOT, and attainment over rates or scaled objectives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxserve.bench import result
from jaxserve.bench.client import Outcome
from jaxserve.bench.drive import Probe, Run
from jaxserve.report.plot import Panel, Series, lines

SCALES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
ALL = "all requests"


def plot(path: Path, run: Run, goals: result.Goals, probes: Sequence[Probe], target: float, title: str = "") -> None:
    """Draw the plot of a run. Objectives are vertical lines, in the color of their class."""
    panels = [
        _distributions(run.outcomes, goals, metric, label)
        for metric, label in (("ttft", "Time to first token"), ("tpot", "Time per output token"))
    ]
    if probes:
        ordered = sorted(probes, key=lambda probe: probe.rate)
        line = Series([probe.rate for probe in ordered], [probe.attainment for probe in ordered])
        panels.append(Panel("On time, by rate", "requests/s", "share of requests", {ALL: line}, (0, 1.02), target))
    elif any(goals.of(outcome) for outcome in run.outcomes):
        shares = [share_at(run, goals, scale) for scale in SCALES]
        panel = Panel(
            "On time, by scale of the objectives",
            "objectives multiplied by",
            "share of requests",
            {ALL: Series(SCALES, shares)},
            (0, 1.02),
            log_x=True,
            marks={ALL: (1.0,)},
            ticks=SCALES[::2],
        )
        panels.append(panel)
    lines(path, panels, columns=3, title=title)


def _distributions(outcomes: Sequence[Outcome], goals: result.Goals, metric: str, label: str) -> Panel:
    """Return step functions of all requests, and of each class if there are several."""
    groups: dict[str, list[Outcome]] = {ALL: list(outcomes)}
    for outcome in outcomes:
        groups.setdefault(outcome.call.slo.name or "(no class)", []).append(outcome)
    if len(groups) == 2:
        del groups[next(name for name in groups if name != ALL)]
    series = {name: distribution(result.samples(each, metric)) for name, each in groups.items()}
    limits = {name: {goals.of(outcome).get(metric) for outcome in each} for name, each in groups.items()}
    # All requests together have a line only if their objective is one; more than three lines would hide the curve.
    marks = {name: tuple(sorted(v for v in values if v)) for name, values in limits.items() if len(values) <= 3}
    if len(groups) > 1:
        marks.pop(ALL, None)
    return Panel(
        label,
        "ms, logarithmic; dashed: objective",
        "share of completed requests",
        series,
        (0, 1.02),
        log_x=True,
        marks=marks,
    )


def distribution(values: Sequence[float]) -> Series:
    """Return a cumulative distribution with at most fifty points, as steps."""
    ordered = sorted(values)
    marks = sorted({round(i * (len(ordered) - 1) / 49) for i in range(50)}) if ordered else []
    return Series([ordered[i] for i in marks], [(i + 1) / len(ordered) for i in marks], steps=True)


def share_at(run: Run, goals: result.Goals, scale: float) -> float:
    """Return the attainment if every objective were `scale` times as long."""
    held = [(outcome, limits) for outcome in run.outcomes if (limits := goals.of(outcome))]
    kept = [o.ok and all(result.milliseconds(o, m) <= v * scale for m, v in limits.items()) for o, limits in held]
    return sum(kept) / len(kept)
