"""Reproduce the figures of SLOs-Serve (arXiv 2504.08784, section 6) in the simulator.

`slos_serve.py all` makes every table, writes each between its markers in docs/research/slos_serve.md, and stores all in
one JSON file; `slos_serve.py TABLE` updates one table. Capacity is the highest rate per GPU at which 90 % of the
requests attain their TTFT and the mean time per token over every ten tokens. The page states models, devices and
lengths.
"""

from __future__ import annotations

import argparse

import page
import slos_serve_steps as steps
from page import Table
from slos_serve_systems import (
    CHATBOT,
    CHATBOT_3X,
    CODER,
    MIXED,
    OURS,
    OURS_PUBLISHED,
    REASONING,
    REASONING_R1,
    SARATHI,
    SCENARIOS,
    SPLITS,
    SUMMARIZER,
    VLLM,
    Mesh,
    System,
    capacity,
    ratio,
    two,
)

PAPER = {"chatbot": "1.41–1.70", "coder": "up to 2.1", "summarizer": "1.14–1.17", "toolllm": "up to 1.9"}
PARTS = (
    System("speculation as published (`caution=0`)", "slos_serve:caution=0", spec=True),
    OURS,
    System("- speculation (`no-spec`)", "slos_serve:no-spec"),
    System("- dynamic batch size (`no-dynamic`)", "slos_serve:no-spec+no-dynamic"),
    System(
        "- best effort (`--admission dp:refuse`)",
        "slos_serve:no-spec+no-dynamic",
        options=(("admission", "dp:refuse"),),
    ),
    System("- promises (`no-admit`)", "slos_serve:no-admit+no-spec+no-dynamic"),
)
SPLIT = (CHATBOT, CODER, SUMMARIZER)  # scenarios that try all three splits
R1_RATES = (3.0, 5.0)
REPLICA_REQUESTS = 240
REPLICAS = ((1, "round_robin"), (2, "next_replica"), (3, "next_replica"), (4, "next_replica"), (4, "round_robin"))


def capacities(args: argparse.Namespace) -> Table:
    """Make Figures 1 and 9: capacity by system and scenario."""
    rows: list[list[object]] = []
    best = {one: max(capacity(split, one) for split in (SPLITS if one in SPLIT else SPLITS[:1])) for one in SCENARIOS}
    for system in (VLLM, SARATHI):
        rows.append([system.label, *(two(capacity(system, one)) for one in SCENARIOS)])
    rows.append(["DistServe", *(two(best[one]) for one in SCENARIOS)])
    for system in (OURS, OURS_PUBLISHED):
        rows.append([system.label, *(two(capacity(system, one)) for one in SCENARIOS)])
    others = {one: [capacity(VLLM, one), capacity(SARATHI, one)] for one in SCENARIOS}
    for label, system in (("× the better of vLLM and Sarathi", OURS), ("the same, published roofline", OURS_PUBLISHED)):
        rows.append([label, *(ratio(capacity(system, one), others[one]) for one in SCENARIOS)])
    rows.append(["paper", *(PAPER.get(one.name, "–") for one in SCENARIOS)])
    rows.append(["× DistServe", *(ratio(capacity(OURS, one), [best[one]]) for one in SCENARIOS)])
    return Table("Capacity, requests/s per GPU (Figures 1 and 9)", ["system", *(one.name for one in SCENARIOS)], rows)


def ratios(args: argparse.Namespace) -> Table:
    """Make Figure 4: DistServe by prefill and decode GPUs."""
    rows: list[list[object]] = []
    for split in SPLITS:
        pairs = ((capacity(split, one), capacity(SPLITS[0], one)) for one in SPLIT)
        rows.append([split.label, *(f"{two(here)} ({ratio(here, [even])})" for here, even in pairs)])
    titles = ["prefill:decode", *(one.name for one in SPLIT)]
    return Table("DistServe, requests/s per GPU, and as multiples of 1:1 (Figure 4)", titles, rows)


def strict(args: argparse.Namespace) -> Table:
    """Make the table of section 6.1, in which at most 2 % of the requests may miss their SLOs."""
    shown = (CHATBOT, CHATBOT_3X)
    found = {
        (system, one): capacity(system, one, goal=0.98) for system in (VLLM, SARATHI, SPLITS[0], OURS) for one in shown
    }
    rows: list[list[object]] = []
    for system in (VLLM, SARATHI, SPLITS[0], OURS):
        cells = (f"{two(found[system, one])} ({ratio(found[OURS, one], [found[system, one]])})" for one in shown)
        paper = {"vLLM": "1.91", "Sarathi": "2.19"}.get(system.label, "")
        rows.append([system.label, *cells, paper])
    titles = ["system", *(one.name for one in shown), "paper, chatbot"]
    return Table(
        "Capacity at 98 %, requests/s per GPU, and how many times as much `slos_serve` has (6.1)", titles, rows
    )


def reasoning(args: argparse.Namespace) -> Table:
    """Make Figure 9's reasoning scenario, on its 1.5B model and on OPT-7B."""
    systems = (VLLM, SARATHI, OURS)
    found = {system: capacity(system, REASONING) for system in systems}
    best = [found[VLLM], found[SARATHI]]
    rows: list[list[object]] = []
    for system in systems:
        row: list[object] = [system.label, f"{found[system]:.3f}", ratio(found[system], best)]
        for rate in R1_RATES:
            summary = steps.run(system, REASONING_R1, rate, REASONING_R1.requests).report.summary
            row.append(f"{100 * summary.window_attained:.1f} ({1e3 * summary.tpot.p50:.0f} ms)")
        rows.append(row)
    titles = ["system", "OPT-7B, requests/s", "× the better of vLLM and Sarathi"]
    titles += [f"R1 1.5B at {rate:g}/s: kept, % (median TPOT)" for rate in R1_RATES]
    return Table("Reasoning (Figure 9)", titles, rows)


def ablation(args: argparse.Namespace) -> Table:
    """Make Figure 14: capacity without some of the parts."""
    scenarios = (CODER, SUMMARIZER, MIXED, CHATBOT_3X)
    rows = [[part.label, *(two(capacity(part, one)) for one in scenarios)] for part in PARTS]
    return Table("Parts taken away, requests/s (Figure 14)", ["system", *(one.name for one in scenarios)], rows)


def replicas(args: argparse.Namespace) -> Table:
    """Make Figure 13: capacity by number of replicas and routing."""
    scenarios = (CHATBOT, CODER)
    rows: list[list[object]] = []
    base: list[float] = []
    for count, place in REPLICAS:
        mesh = Mesh(count, colocated=count > 1)
        system = System(f"{count}, {place}", "slos_serve:no-spec", mesh, options=(("routing", place),))
        found = [count * capacity(system, one, requests=REPLICA_REQUESTS) for one in scenarios]
        base = base or found
        paper = {"2, next_replica": "2.18", "3, next_replica": "3.36", "4, next_replica": "4.61"}.get(system.label, "–")
        rows.append([system.label, *(f"{one / first:.2f}" for one, first in zip(found, base, strict=True)), paper])
    titles = ["replicas, routing", *(one.name for one in scenarios), "paper, chatbot"]
    return Table("Capacity in all, as multiples of one replica's (Figure 13)", titles, rows)


MAKERS: tuple[page.Maker, ...] = (
    steps.batching, steps.traces, steps.sizes, steps.fidelity, steps.burst, steps.tails,
    capacities, ratios, ablation, reasoning, strict, replicas,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(page.run(__doc__, "slos_serve", MAKERS, sized=False))
