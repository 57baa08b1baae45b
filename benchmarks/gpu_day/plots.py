"""Plots of the day: how far each kernel, and each step of the engine, is from its floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

SHARE = "x_floor"  # a table with this column, time / lower bound, is drawn
COLORS = {True: "#2b6cb0", False: "#b7791f"}  # of this repository, others


def draw(rows: Mapping[str, Sequence[Mapping[str, Any]]], out: Path) -> list[Path]:
    """Draw one chart for each table of times and floors, and return their paths."""
    found = {name: [row for row in table if row.get(SHARE)] for name, table in rows.items()}
    return [_bars(name, table, out / f"{name.replace(' ', '_')}.png") for name, table in found.items() if table]


def _bars(name: str, table: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw the share of the floor's speed that each row reaches, as horizontal bars."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.24 * len(table)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shares = [100 / row[SHARE] for row in table]
    colors = [COLORS["kernel" not in row or "mosaic" in row["kernel"]] for row in table]
    drawn = axes.barh(range(len(table)), shares, color=colors)
    axes.bar_label(drawn, labels=[f"{share:.0f} %" for share in shares], padding=2, fontsize=7)
    axes.set_yticks(range(len(table)), [_label(row) for row in table], fontsize=7)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.axvline(100, color="grey", linestyle="--", linewidth=1)
    axes.set(title=f"{name}: lower bound of the time / measured time", xlabel="%")
    figure.savefig(path, dpi=110)
    return path


def _label(row: Mapping[str, Any]) -> str:
    """Return what a row is of: its columns before the first measured one."""
    words = takewhile(lambda item: not isinstance(item[1], float), row.items())
    return ", ".join(value if isinstance(value, str) else f"{key} {value}" for key, value in words)
