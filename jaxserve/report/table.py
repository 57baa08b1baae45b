"""Tables for terminals and documents."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

PLAIN_WIDTH = 1000  # columns if the output is not a terminal: never cut off or fold lines of a log


def cell(value: object) -> str:
    """Format a value: floats to four significant digits, None and NaN as a dash."""
    if value is None or (isinstance(value, float) and isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return str(value)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Build a rich table with right-aligned numbers. Raises ValueError if a row's length is wrong."""
    drawn = Table(title=title or None, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=0)
    for index, name in enumerate(columns):
        numeric = all(row[index] is None or isinstance(row[index], int | float) for row in rows if len(row) > index)
        drawn.add_column(name, justify="right" if rows and numeric else "left", overflow="fold")
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"a row of {len(row)} cells in a table of {len(columns)} columns: {row!r}")
        drawn.add_row(*(cell(value) for value in row))
    return drawn


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, console: Console | None = None
) -> None:
    """Print a table to stdout, or to `console`."""
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    if title:
        console.print(title, style="bold", soft_wrap=True, highlight=False)
    console.print(table("", columns, rows))


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)
