"""The tables of `jaxserve top`. A narrow terminal gets fewer columns, those that matter least first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite, nan
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from jaxserve.cli.top.sample import KV, RUNNING, TPOT, Interval
from jaxserve.report.printable import printable_line

GOOD, POOR = 0.9, 0.5  # attainment from which it is green, and below which it is red
NOTHING = "–"
ROWS = 256  # of a table, at most


class Column(NamedTuple):
    """A column: its cells, and how early a narrow terminal leaves it out (0: never)."""

    name: str
    cells: Sequence[Text | str]
    leaves: int = 0


def view(interval: Interval, console: Console) -> RenderableType:
    tables = [_load(interval), _latency(interval)]
    instances = _instances(interval)
    tables += [table for table in (instances, _attainment(interval)) if table is not None]
    return Group(*(fitted(columns, console) for columns in tables))


def fitted(columns: Sequence[Column], console: Console) -> Table:
    """Return a table that is no wider than the console, without the columns that it has no room for."""
    left, unlimited = list(columns), console.options.update(max_width=10_000)
    while True:
        table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1), pad_edge=False)
        for number, column in enumerate(left):
            table.add_column(column.name, justify="left" if number == 0 else "right", no_wrap=True, overflow="ellipsis")
        for row in zip(*(column.cells for column in left), strict=True):
            table.add_row(*(cell if isinstance(cell, Text) else Text(printable_line(cell)) for cell in row))
        most = max(left, key=lambda column: column.leaves)
        if not most.leaves or Measurement.get(console, unlimited, table).maximum <= console.width:
            return table
        left.remove(most)


def _load(interval: Interval) -> list[Column]:
    now = interval.now
    return [
        Column("running", [_count(now.total(RUNNING))]),
        Column("waiting", [_count(now.total("num_requests_waiting"))]),
        Column("KV use", [share(_mean([value for _, value in now.series(now.first(KV))]))]),
        Column("ended/s", [_rate(interval.rate("request_success_total"))], 3),
        Column("prompt tok/s", [_rate(interval.rate("prompt_tokens_total"))], 2),
        Column("output tok/s", [_rate(interval.rate("generation_tokens_total"))], 1),
        Column("prefix hits", [share(interval.share("prefix_cache_hits_total", "prefix_cache_queries_total"))], 4),
        Column("KV dropped", [_count(interval.gained("num_preemptions_total"))], 5),
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else nan


def _latency(interval: Interval) -> list[Column]:
    names = {"TTFT": "time_to_first_token_seconds", "TPOT": interval.now.first(TPOT, "_count")}
    histograms = {label: interval.histogram(name) for label, name in names.items()}
    columns = [
        Column("latency", list(histograms)),
        Column("p50", [_seconds(histogram.quantile(0.5), histogram.last) for histogram in histograms.values()]),
        Column("p95", [_seconds(histogram.quantile(0.95), histogram.last) for histogram in histograms.values()]),
        Column("mean", [_seconds(histogram.mean) for histogram in histograms.values()], 3),
        Column("count", [_count(histogram.observed) for histogram in histograms.values()], 4),
    ]
    promised = {"TTFT": "ttft", "TPOT": "tpot"}
    if interval.now.has("slo_seconds"):
        default = [interval.now.total("slo_seconds", objective=promised[label]) for label in histograms]
        columns.append(Column("default SLO", [_seconds(value) for value in default], 2))
    if interval.now.has("predicted_ttft_seconds_count"):
        guess = _seconds(interval.histogram("predicted_ttft_seconds").mean)
        columns.append(Column("predicted mean", [guess, ""], 1))
    return columns


def _instances(interval: Interval) -> list[Column] | None:
    """Return the table of instances; None for a single one, of which the first table says the same."""
    now = interval.now
    names = now.values(RUNNING, "engine")
    if len(names) < 2:
        return None
    names = names[:ROWS]
    usage = now.by(now.first(KV), "engine")

    def summed(metric: str, shown: Callable[[float], str]) -> list[str]:
        by_engine = now.by(metric, "engine")
        return [shown(sum(by_engine[name]) if name in by_engine else nan) for name in names]

    columns = [
        Column("instance", names),
        Column("running", summed(RUNNING, _count)),
        Column("waiting", summed("num_requests_waiting", _count)),
        Column("KV use", [share(_mean(usage.get(name, []))) for name in names], 1),
    ]
    more = (
        ("prompt tokens left", "prefill_backlog_tokens", _count, 4),
        ("prefill queue", "prefill_queue_seconds", _seconds, 3),
        ("slack", "instance_slack_seconds", _seconds, 2),
    )
    for title, metric, shown, leaves in more:
        if now.has(metric):
            columns.append(Column(title, summed(metric, shown), leaves))
    return columns


def _attainment(interval: Interval) -> list[Column] | None:
    """Return the table of attainment by class of requests; None if none ended, or the server has no objectives."""
    now = interval.now
    ended = {name: interval.gained("slo_requests_total", phase="all", slo_class=name)
             for name in now.values("slo_requests_total", "slo_class")[:ROWS]}  # fmt: skip
    names = [name for name, count in ended.items() if count > 0]
    if not names:
        return None

    def kept(name: str, phase: str) -> Text | str:
        kept_share = interval.share("slo_attained_total", "slo_requests_total", phase=phase, slo_class=name)
        return judged(kept_share)

    return [
        Column("class", names),
        Column("attained", [kept(name, "all") for name in names]),
        Column("TTFT", [kept(name, "ttft") for name in names], 2),
        Column("TPOT", [kept(name, "tpot") for name in names], 3),
        Column("requests", [_count(ended[name]) for name in names], 1),
    ]


def judged(value: float) -> Text | str:
    """Return a share of requests on time, in the color of how good it is."""
    if value != value:
        return NOTHING
    return Text(share(value), "green" if value >= GOOD else "red" if value < POOR else "yellow")


def share(value: float) -> str:
    """Format a share in percent."""
    return NOTHING if value != value else f"{value:.0%}" if value in (0.0, 1.0) else f"{value:.1%}"


def _count(value: float) -> str:
    return NOTHING if value != value else f"{value:,.0f}"


def _rate(value: float) -> str:
    return NOTHING if value != value else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _seconds(value: float, bound: float = inf) -> str:
    """Format seconds; a quantile above the last bound of its histogram is inf."""
    if value != value:
        return NOTHING
    if not isfinite(value):
        return NOTHING if bound == inf else f"> {_seconds(bound)}"
    return f"{1e3 * value:.3g} ms" if abs(value) < 1 else f"{value:.2f} s" if abs(value) < 100 else f"{value:,.0f} s"
