"""Reproduce FlowPrefill's figures in the simulator: goodput, SLO scale, orders, batching, chunks, models, motivation.

Every request ends with its first token, because the paper evaluates only TTFT. Each cell has 800 requests and two seeds
unless the page says otherwise. `python benchmarks/reproduce/flowprefill.py all` writes docs/research/flowprefill.md and
its JSON. flowprefill_stops.py makes Figures 12 and 16, on preempted steps.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from statistics import fmean
from typing import Any

import flowprefill_models
import flowprefill_motivation
import page
from flowprefill_systems import DEPLOYMENTS, LLAMA_8B, PUBLISHED, SEEDS, SYSTEMS, WHOLE, System, percent, sized, ttft
from page import Table

from jaxserve.report import plot

FEWER = 400  # requests per simulation of the other models and of the ablations
SHARES = (0.17, 0.34, 0.68, 1.02)  # of the instance's capacity: 1, 2, 4 and 6 requests/s of Llama3-8B
SCALE_SHARES = (0.34, 0.68)
CURVE = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)  # shares of the plot; one seed

Row = Sequence[object]


def parallel(make: Callable[[Any], Row], of: Sequence[Any]) -> list[Row]:
    """Make a row of each item, with one process per core."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(make, of))


def everywhere(args: argparse.Namespace) -> list[System]:
    """Return every system on Llama3-8B, and the published systems on the other models."""
    own = [replace(system, where=LLAMA_8B) for system in SYSTEMS]
    more = [replace(one, where=where, requests=FEWER) for where in DEPLOYMENTS[1:] for one in PUBLISHED]
    return [sized(args, system) for system in (*own, *more)]


def goodput(args: argparse.Namespace) -> Table:
    """Make Figures 9 (first row) and 17: the highest rate at which 90 % attain their TTFT, and attainment by load."""
    made = page.spread(args, _goodput, everywhere(args))
    best = {row[0]: float(row[2]) for row, _ in made if row[1] == SYSTEMS[0].label}
    rows = [[*row, best[row[0]] / float(row[2])] for row, _ in made]
    titles = ["model", "system", "goodput, req/s", *(f"at {share:.0%} load" for share in SHARES), "FlowPrefill ×"]
    curves = {f"{row[0]} | {row[1]}": curve for row, curve in made}
    draw("flowprefill-goodput.png", curves, "load: 1 is all that the instance can compute", CURVE)
    return Table("Goodput (Figures 9 and 17, first row)", titles, rows, {"load": CURVE, "attained": curves})


def _goodput(system: System) -> tuple[list[Any], list[float]]:
    full = system.where.full
    row = [system.where.label, system.label, system.goodput(), *percent(system, *(full * share for share in SHARES))]
    return row, percent(replace(system, seeds=system.seeds[:1]), *(full * share for share in CURVE))


def scale(args: argparse.Namespace) -> Table:
    """Make Figures 9 (second row) and 17: the tightest SLO scale that 90 % attain; other models at one load."""
    systems = [sized(args, replace(one, requests=FEWER, seeds=SEEDS[:1])) for one in everywhere(args)]
    titles = ["model", "system", *(f"tightest at {share:.0%} load" for share in SCALE_SHARES)]
    return Table("SLO scale (Figures 9 and 17, second row)", titles, page.spread(args, _scale, systems))


def _scale(system: System) -> Row:
    rates = [system.where.full * share for share in SCALE_SHARES]
    tried = rates if system.where == LLAMA_8B else rates[:1]
    found = [system.tightest(rate) for rate in tried]
    return [system.where.label, system.label, *found, *[None] * (len(rates) - len(tried))]


def draw(name: str, curves: dict[str, list[float]], xlabel: str, x: Sequence[float]) -> None:
    """Draw a panel for each model with a line for each published system."""
    panels = []
    for where in DEPLOYMENTS:
        lines = {one.label: plot.Series(x, curves[f"{where.label} | {one.label}"]) for one in PUBLISHED}
        panels.append(plot.Panel(where.label, xlabel, "TTFT attained, %", lines, (0, 102), 90.0))
    page.picture(name, panels)


def orders(args: argparse.Namespace) -> Table:
    """Make Figure 10: S-EDF, D-EDF and EDF as FlowPrefill's priority."""
    named = (("S-EDF", "sedf"), ("D-EDF", "deadline_edf"), ("EDF", "edf"))
    titles = ["order", "goodput, req/s", "SLO scale at 5 req/s", "5 req/s, %", "6", "7", "8"]
    systems = [sized(args, System(label, f"flowprefill:order={name}", requests=FEWER)) for label, name in named]
    return Table("Orders (Figure 10)", titles, page.spread(args, _order, systems))


def _order(system: System) -> Row:
    return [system.label, system.goodput(), system.tightest(5.0), *percent(system, 5, 6, 7, 8)]


def batching(args: argparse.Namespace) -> Table:
    """Make Figure 11: attainment and throughput by batch token budget, up to far beyond the instance's capacity."""
    systems = [System("no batching", "flowprefill:batch=0")]
    for budget in (512, 1024, 2048, 4096, 8192):
        systems.append(System(f"{budget}", f"flowprefill:batch={budget}"))
        systems.append(System(f"{budget}, literal", f"flowprefill:batch={budget}+literal"))
    titles = ["batch budget G", "goodput", "6 req/s: % / req/s", "8", "12"]
    return Table(
        "Batching (Figure 11)",
        titles,
        page.spread(args, _batching, [sized(args, replace(one, requests=FEWER)) for one in systems]),
    )


def _batching(system: System) -> Row:
    cells = []
    for rate in (6.0, 8.0, 12.0):
        reports = system.run(rate)
        share = 100 * fmean(ttft(report.summary) for report in reports)
        cells.append(f"{share:.1f} / {fmean(report.summary.request_throughput for report in reports):.2f}")
    return [system.label, system.goodput(), *cells]


def chunks(args: argparse.Namespace) -> Table:
    """Make Figure 15: FlowPrefill with chunked prompts."""
    sizes = (1024, 2048, 4096, 8192, 16384, WHOLE)
    titles = ["chunk", "goodput, op", "6 req/s, op, %", "goodput, chunk", "6 req/s, chunk, %"]
    pairs = [
        [
            sized(args, System("", "flowprefill", {"tokens": tokens, "boundary": one}, requests=FEWER))
            for one in ("op", "chunk")
        ]
        for tokens in sizes
    ]
    made = page.spread(args, _chunks, pairs)
    names = ["none" if tokens == WHOLE else tokens for tokens in sizes]
    rows = [[name, *cells] for name, cells in zip(names, made, strict=True)]
    return Table("Chunked prompts (Figure 15)", titles, rows)


def _chunks(systems: Sequence[System]) -> Row:
    return [cell for system in systems for cell in (system.goodput(), *percent(system, 6.0))]


MAKERS = (goodput, scale, orders, batching, chunks, *flowprefill_motivation.MAKERS, *flowprefill_models.MAKERS)

if __name__ == "__main__":
    raise SystemExit(page.run(__doc__, "flowprefill", MAKERS))
