"""Plots as PNG or SVG files: lines, bars and CDFs, legible in gray and by the color-blind."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from jaxserve.report.colors import own_first, styles

DASHES = ("-", "--", "-.", ":")  # of the forms of one policy, which share a color
EVERY = 1.3  # decades of a logarithmic axis up to which more than 1, 2 and 5 are labeled
COARSE = 4.0  # decades from which only powers of ten are


@dataclass(frozen=True, slots=True)
class Series:
    """A line; `low` and `high` are drawn as a band, for the spread over seeds.

    steps: draw a step function, which has its value from each x on, without markers.
    """

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dashed: bool = False
    steps: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """A set of axes.

    level: a dotted horizontal mark, for a goal. marks: dashed vertical marks in the color of a series, for
    objectives. ticks: positions of the x axis's labels.
    """

    title: str
    xlabel: str
    ylabel: str
    series: Mapping[str, Series] = field(default_factory=dict)
    ylim: tuple[float, float] | None = None
    level: float | None = None
    log_x: bool = False
    marks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    ticks: Sequence[float] | None = None

    @property
    def empty(self) -> bool:
        """Whether no series has a point to draw."""
        return not any(np.isfinite(np.asarray(line.y, dtype=float)).any() for line in self.series.values())


def lines(path: str | Path, panels: Panel | Sequence[Panel], *, title: str = "", columns: int = 2) -> Path:
    """Draw one panel, or several in a grid with one legend; return the path. Panels without a point are left out."""
    panels = [panels] if isinstance(panels, Panel) else list(panels)
    panels = [panel for panel in panels if not panel.empty] or panels[:1]
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.4 * columns, 3.6 * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes, panel in zip(grid, panels, strict=False):
        _draw(axes, panel)
    for axes in list(grid)[len(panels) :]:
        axes.set_visible(False)
    names: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        names |= {label: handle for handle, label in zip(handles, labels, strict=True) if label not in names}
    if names:
        order = own_first(names)
        handles = [names[name] for name in order]
        figure.legend(handles, order, loc="outside lower center", ncols=min(len(names), 2 * columns), frameon=False)
    if title:
        figure.suptitle(title)
    return _save(figure, path)


def cdf(
    path: str | Path,
    series: Mapping[str, Sequence[float]],
    *,
    title: str = "",
    xlabel: str = "seconds",
    level: float | None = None,
    log_x: bool = False,
) -> Path:
    """Draw cumulative distributions as steps, one per name; a finite `level` marks a value on the x axis, an SLO."""
    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    drawn = styles(series)
    for name in own_first(series):
        values = series[name]
        ordered = np.sort(np.asarray(values, dtype=float))
        ordered = ordered[np.isfinite(ordered)]
        if len(ordered):
            share = np.arange(1, len(ordered) + 1) / len(ordered)
            dash = DASHES[drawn[name].variant % len(DASHES)]
            axes.step(ordered, share, dash, where="post", label=name, color=drawn[name].color)
    if level is not None and np.isfinite(level):
        axes.axvline(level, color="grey", linestyle="--", linewidth=1, label="objective")
    if log_x and any(value > 0 for values in series.values() for value in values):
        _log(axes)
    axes.set(title=title, xlabel=xlabel, ylabel="share of requests", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
    return _save(figure, path)


def bars(
    path: str | Path,
    values: Mapping[str, float],
    *,
    title: str = "",
    ylabel: str = "",
    level: float | None = None,
    level_name: str = "",
    at_least: Collection[str] = (),
    below: Collection[str] = (),
) -> Path:
    """Draw one bar per name with its value on top.

    level: a dashed horizontal mark, for a bound. at_least, below: names with values that are lower and upper bounds;
    their bars are hatched or outlined, with an open arrowhead and a label.
    """
    figure = Figure(figsize=(max(4.0, 1.1 * len(values) + 1.5), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    values = {name: values[name] for name in own_first(values)}
    colors = [style.color for style in styles(values).values()]
    drawn = axes.bar(range(len(values)), list(values.values()), color=colors)
    signs = {**dict.fromkeys(at_least, "≥ "), **dict.fromkeys(below, "< ")}
    labels = [f"{signs.get(name, '')}{value:.3g}" for name, value in values.items()]
    axes.bar_label(drawn, labels=labels, padding=7 if signs else 2)
    for name, bar in zip(values, drawn, strict=True):
        if name in at_least:
            bar.set(hatch="//", edgecolor="white")
        elif name in below:
            bar.set(fill=False, linestyle="--", edgecolor=bar.get_facecolor())
    for names, marker, meaning in ((at_least, "^", "at least"), (below, "v", "below")):
        if places := [(index, value) for index, (name, value) in enumerate(values.items()) if name in names]:
            style: dict[str, Any] = {
                "linestyle": "none",
                "markerfacecolor": "white",
                "markeredgecolor": "black",
                "markersize": 9,
            }
            axes.plot(*zip(*places, strict=True), marker=marker, label=meaning, clip_on=False, **style)
    tilt = 30 if len(values) > 4 or max(map(len, values), default=0) > 12 else 0
    axes.set_xticks(range(len(values)), list(values), rotation=tilt, ha="right" if tilt else "center")
    if level is not None and np.isfinite(level):
        axes.axhline(level, color="grey", linestyle="--", linewidth=1, label=level_name)
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    axes.set(title=title, ylabel=ylabel)
    axes.margins(y=0.12)
    return _save(figure, path)


def _draw(axes: Any, panel: Panel) -> None:
    if panel.empty:
        axes.text(0.5, 0.5, "nothing was measured", transform=axes.transAxes, ha="center", color="grey")
    drawn = styles(panel.series)
    for name, line in panel.series.items():
        color, marker, variant = drawn[name]
        style = "--" if line.dashed else DASHES[variant % len(DASHES)]
        if line.steps:
            axes.step(line.x, line.y, style, where="post", color=color, linewidth=1.6, label=name)
        else:
            axes.plot(line.x, line.y, style, color=color, marker=marker, markersize=4, linewidth=1.6, label=name)
        for mark in panel.marks.get(name, ()):
            axes.axvline(mark, color=color, linestyle="--", linewidth=1)
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.15, linewidth=0)
    if panel.level is not None:
        axes.axhline(panel.level, color="grey", linestyle=":", linewidth=1)
    if panel.ylim:
        axes.set_ylim(*panel.ylim)
    if panel.log_x and any(x > 0 for line in panel.series.values() for x in line.x):
        _log(axes)
    if panel.ticks is not None:
        axes.set_xticks(list(panel.ticks), [f"{tick:g}" for tick in panel.ticks], minor=False)
        axes.set_xticks([], minor=True)
    axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    axes.grid(alpha=0.3)


def _log(axes: Any) -> None:
    """Make the x axis logarithmic, with plain numbers at 1, 2 and 5, or as many as fit."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    decades = np.log10(high / low)
    subs = tuple(range(1, 10)) if decades < EVERY / 2 else (1, 2, 3, 5, 7) if decades < EVERY else (1, 2, 5)
    axes.xaxis.set_major_locator(LogLocator(subs=(1,) if decades > COARSE else subs, numticks=30))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _save(figure: Any, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
