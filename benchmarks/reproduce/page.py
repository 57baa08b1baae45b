"""Make the tables of a reproduction page, store them as JSON, and write them between the markers of the page.

A script passes its makers, functions that return a Table, to `run`. `SCRIPT all` makes every table, writes
benchmarks/results/PAGE-DATE.json, and puts each table into docs/research/PAGE.md between the lines
`<!-- table: NAME -->` and `<!-- end -->`. The prose around the tables is written by hand. Tables made with a
non-default number of requests or seeds are only printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from math import isfinite, log10
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # import this checkout, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from jaxserve.report.colors import own_first, styles
from jaxserve.report.plot import DASHES, Panel
from jaxserve.report.table import markdown, print_table

PAGES = common.ROOT / "docs" / "research"
PLOTS = PAGES / "plots"
DIGITS = 3  # significant digits on a page; curves in the JSON have one more
COMMAND = "python benchmarks/reproduce"  # makes all tables of all pages
SUMMARY = "results"  # marker of the line that says how the tables were made


@dataclass(frozen=True)
class Table:
    """One table. data: stored only in the JSON, such as the points of a curve."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    data: Mapping[str, Any] = field(default_factory=dict)


Maker = Callable[[argparse.Namespace], Table | None]  # None: nothing to store
One, Made = TypeVar("One"), TypeVar("Made")


def run(
    about: str | None,
    page: str,
    makers: Sequence[Maker],
    parser: argparse.ArgumentParser | None = None,
    also: Sequence[Maker] = (),
    sized: bool = True,
) -> int:
    """Make the tables named on the command line, or all; a table has the name of its maker.

    Makers get the parsed arguments: `requests` and `seeds` (None unless given), `jobs`, and the arguments of `parser`.
    also: makers that `all` leaves out. sized: whether the makers heed `requests` and `seeds`.
    """
    tables = {maker.__name__: maker for maker in (*makers, *also)}
    parser = parser or argparse.ArgumentParser()
    parser.description, parser.formatter_class = about, argparse.RawDescriptionHelpFormatter
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"all, or {', '.join(tables)} [all]")
    parser.set_defaults(requests=None, seeds=None)
    for name, per in (("--requests", "simulation"), ("--seeds", "cell")) if sized else ():
        parser.add_argument(name, type=int, metavar="N", help=f"per {per}; only print the tables [each table's own]")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes [all cores]")
    parser.add_argument("--missing", action="store_true", help="only tables that are not of this state of the source")
    parser.add_argument("--list", action="store_true", help="only list them")
    parser.add_argument("--print-only", action="store_true", help="change neither the page nor its JSON")
    args = parser.parse_args()
    unknown = [name for name in args.tables if name not in (*tables, "all")]
    if unknown:
        parser.error(f"unknown table {unknown[0]!r}; choose from all, {', '.join(tables)}")
    chosen = [one.__name__ for one in makers] if not args.tables or "all" in args.tables else args.tables
    keep = not (args.print_only or args.requests or args.seeds)
    if args.missing:
        chosen = missing(page, chosen)
    if args.list:
        print(f"{page}: {', '.join(chosen) or 'nothing to make'}")
        return 0
    for name in chosen:
        began = processor_seconds()
        made = tables[name](args)
        if made is None:
            continue
        print_table(made.title, made.columns, made.rows)
        if keep:
            save(page, name, made, processor_seconds() - began)
    return 0


def source() -> str:
    """Return a digest of what the tables depend on, without comments and docstrings."""
    command = [sys.executable, common.ROOT / ".ci" / "digest.py", "sched", "configs", "benchmarks/reproduce"]
    return subprocess.run(command, cwd=common.ROOT, capture_output=True, text=True, check=True).stdout.strip()


def missing(page: str, names: Iterable[str]) -> list[str]:
    """Return the tables that the newest results of a page lack, or have of another state of the source."""
    kept, digest = newest(page), source()
    tables = json.loads(kept.read_text(encoding="utf-8")).get("tables", {}) if kept else {}
    return [name for name in names if tables.get(name, {}).get("source") != digest]


def processor_seconds() -> float:
    """Return the CPU seconds of this process and its finished children."""
    return sum(os.times()[:4])


def spread(args: argparse.Namespace, make: Callable[[One], Made], of: Iterable[One]) -> list[Made]:
    """Apply `make` to each item in `args.jobs` processes, and return the results in order."""
    if args.jobs == 1:
        return [make(one) for one in of]
    with ProcessPoolExecutor(args.jobs) as pool:
        return list(pool.map(make, of))


def save(page: str, name: str, made: Table, seconds: float) -> None:
    """Add a table to the newest results of the page, write them as today's JSON, and update the page."""
    kept = newest(page)
    document = json.loads(kept.read_text(encoding="utf-8")) if kept else {}
    origin = common.origin()
    tables = document.setdefault("tables", {})
    tables[name] = {
        "title": made.title,
        "columns": list(made.columns),
        "rows": [[_plain(value) for value in row] for row in made.rows],
        "seconds": round(seconds, 1),
        "source": source(),
        **{key: origin[key] for key in ("commit", "uncommitted_changes", "date")},
        **({"data": _plain(made.data, DIGITS + 1)} if made.data else {}),
    }
    document = {"page": page, "command": COMMAND, "origin": origin, "tables": tables}
    path = common.RESULTS / f"{page}-{time.strftime('%Y-%m-%d')}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if kept and kept != path:
        kept.unlink()
    write(PAGES / f"{page}.md", path, document)


def newest(page: str) -> Path | None:
    """Return the newest JSON of a page by the date in its name."""
    return max(common.RESULTS.glob(f"{page}-[0-9]*-[0-9]*-[0-9][0-9].json"), default=None)


def write(page: Path, path: Path, document: Mapping[str, Any]) -> None:
    """Write all tables of a document between their markers. Raises ValueError if the page lacks one."""
    text = page.read_text(encoding="utf-8")
    for name, content in blocks(path, document).items():
        found = marked(name).search(text)
        if found is None:
            raise ValueError(f"{page} has no lines '<!-- table: {name} -->' and '<!-- end -->'")
        text = text[: found.start(1)] + content + "\n" + text[found.end(1) :]
    page.write_text(text, encoding="utf-8")


def blocks(path: Path, document: Mapping[str, Any]) -> dict[str, str]:
    """Return the text that belongs between each marker of a page."""
    tables = document["tables"]
    minutes = sum(table["seconds"] for table in tables.values()) / 60
    link = f"[`{path.name}`](../../benchmarks/results/{path.name})"
    digests = {table.get("source") for table in tables.values()}
    state = " at one state of the source" if len(digests) == 1 and None not in digests else ""
    says = (
        f"`{document['command']}` made the tables below and {link}{state} in {minutes:.0f} minutes of processor time."
    )
    return {SUMMARY: says} | {name: markdown(table["columns"], table["rows"]) for name, table in tables.items()}


def marked(name: str) -> re.Pattern[str]:
    """Return a pattern for a table's block in a page; group 1 is the text between its markers."""
    return re.compile(rf"<!-- table: {re.escape(name)} -->\n(.*?)<!-- end -->", re.DOTALL)


def picture(name: str, panels: Sequence[Panel], columns: int = 2) -> None:
    """Draw panels with a common legend into docs/research/plots, as a PNG of at most some tens of KB."""
    PLOTS.mkdir(exist_ok=True)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.3 * columns, 2.3 * rows + 0.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=True):
        drawn = styles(panel.series)
        for label in own_first(panel.series):
            line, (color, marker, variant) = panel.series[label], drawn[label]
            style = {"color": color, "marker": marker if len(line.x) < 30 else None, "markersize": 3}
            axes.plot(line.x, line.y, DASHES[variant % len(DASHES)], linewidth=1.2, label=label, **style)
        if panel.level is not None:
            axes.axhline(panel.level, color="grey", linestyle=":", linewidth=1)
        if panel.ylim is not None:
            axes.set_ylim(*panel.ylim)
        axes.set_title(panel.title, fontsize=9)
        axes.set_xlabel(panel.xlabel, fontsize=8)
        axes.set_ylabel(panel.ylabel, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
    figure.set_dpi(90)
    canvas.draw()
    drawn = Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")
    drawn.quantize(48).save(PLOTS / name, optimize=True)


def _plain(value: Any, digits: int = DIGITS) -> Any:
    """Convert a value for JSON, with floats rounded to `digits` significant digits."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, digits) for item in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    number = float(value)
    if not isfinite(number):
        return None
    return round(number, digits - 1 - int(log10(abs(number)) // 1)) if number else 0.0
