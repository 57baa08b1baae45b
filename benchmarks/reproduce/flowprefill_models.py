"""Reproduce FlowPrefill's TTFT predictions (Figure 13), scheduling rounds (6.4) and single SLO (Figure 14)."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import page
from flowprefill_systems import CP2K, DEPLOYMENTS, FLOW, LLAMA_8B, System, sized
from page import Table

from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.perf.registry import make
from jaxserve.sched.sim import Arrival, simulate
from jaxserve.sched.sim.scenarios import CHATBOT
from jaxserve.sched.sim.workload import POISSON

LOADS = (0.17, 0.34, 0.68)  # shares of the instance's capacity


def prediction(args: argparse.Namespace) -> Table:
    """Make Figure 13: the TTFT of each request against the prediction by a polynomial of its length."""
    systems = [replace(sized(args, FLOW), where=where) for where in DEPLOYMENTS[:3]]
    rows = page.spread(args, _prediction, [(system, load) for system in systems for load in LOADS])
    titles = [
        "model",
        "load",
        "within 10 %, %",
        "within 25 %",
        "within 100 %",
        "median error, %",
        "text",
        "search, file",
    ]
    return Table("TTFT beside the prediction (Figure 13)", [*titles, "step alone, %"], rows)


def _prediction(case: tuple[System, float]) -> list[object]:
    system, load = case
    truth = system.where.latency.solve()
    model = make("poly", truth)
    errors, steps, classes = [], [], []
    for report in system.run(load * system.where.full):
        for one in report.measured:
            alone = Load().add_chunk(one.prompt, 0)
            predicted = model.step_time(alone)
            errors.append(abs(one.ttft - predicted) / predicted)
            steps.append(abs(truth.step_time(alone) - predicted) / truth.step_time(alone))
            classes.append(one.class_)
    found, kinds = 100 * np.array(errors), np.array(classes)
    within = [100 * float((found <= limit).mean()) for limit in (10, 25, 100)]
    short, long = (float(np.median(found[np.isin(kinds, names)])) for names in (["text"], ["search", "file"]))
    cells = [f"{one:.1f}" for one in (*within, float(np.median(found)), short, long, 100 * fmean(steps))]
    return [system.where.label, f"{load:.0%}", *cells]


class Rounds:
    """Counts of scheduling rounds and of the commands they made. Writer: the logs of prefill instances."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __call__(self, name: str, *_: object) -> Callable[..., None]:
        def log(kind: str, **fields: Any) -> None:
            if kind == "planned":
                kind = "resume" if fields["plan"].resume is not None else "submit"
            self.counts[kind] += 1

        return log if name.startswith("prefill") else _nothing


def _nothing(kind: str, **fields: Any) -> None:
    pass


def rounds(args: argparse.Namespace) -> Table:
    """Make the table of section 6.4: scheduling rounds per request, and the commands that they make."""
    systems = [
        sized(args, one)
        for one in (
            FLOW,
            System("FlowPrefill, no batching", "flowprefill:batch=0"),
            System("FlowPrefill, whole prompts at layers", "flowprefill", {"boundary": "layer"}),
            System("chunks of 2K, no preemption", "flowprefill", {"boundary": "chunk", "tokens": 2048}),
            System("chunks of 512, no preemption", "flowprefill", {"boundary": "chunk", "tokens": 512}),
        )
    ]
    rows = page.spread(args, _rounds, [(system, rate) for rate in (2.0, 6.0) for system in systems])
    titles = ["requests/s", "system", "rounds per request", "of running steps", "submit", "preempt", "resume"]
    return Table("Scheduling rounds per request (section 6.4)", [*titles, "TTFT attained, %"], rows)


def _rounds(case: tuple[System, float]) -> list[object]:
    system, rate = case
    watch = Rounds()
    reports = system.run(rate, logs=watch)
    total = sum(len(report.measured) for report in reports)
    each = {name: count / total for name, count in watch.counts.items()}
    asked = each.get("interrupts", 0.0)
    commands = [each.get(name, 0.0) for name in ("submit", "suspend", "resume")]
    attained = 100 * fmean(report.summary.ttft_attained for report in reports)
    return [f"{rate:g}", system.label, each["plan"] + asked, asked, *commands, attained]


@dataclass(frozen=True)
class Chat:
    """ShareGPT's prompts with the lengths of SLOs-Serve's Table 4, all with the TTFT of a chatbot (Table 2)."""

    name: str = "ShareGPT, prompts alone"

    def draw(self, count: int, rate: float, seed: int) -> list[Arrival]:
        slo = SLO(0.25, CHATBOT.tpot)
        drawn = replace(CHATBOT, arrivals=POISSON).draw(count, rate, seed)
        return [replace(one, output_tokens=1, slo=slo) for one in drawn]


def single_slo(args: argparse.Namespace) -> Table:
    """Make Figure 14: 500 short prompts with the same TTFT objective, Poisson arrivals."""
    rates = (2, 4, 6, 8, 10, 12, 14, 16)
    systems = [sized(args, replace(one, requests=500)) for one in (FLOW, CP2K)]
    rows = page.spread(args, _single_slo, [(system, rates) for system in systems])
    titles = ["system", *(f"{rate} req/s: % / req/s" for rate in rates)]
    return Table("One SLO for all, ShareGPT (Figure 14)", titles, rows)


def _single_slo(case: tuple[System, Sequence[float]]) -> list[object]:
    system, rates = case
    cells = []
    for rate in rates:
        reports = [
            simulate(
                Chat(), system.policy, system.mesh, LLAMA_8B.latency, seed, qps=rate,
                num_requests=system.requests, options=system.settings(),
            )
            for seed in system.seeds
        ]  # fmt: skip
        share = 100 * fmean(report.summary.ttft_attained for report in reports)
        cells.append(f"{share:.1f} / {fmean(report.summary.request_throughput for report in reports):.2f}")
    return [system.label, *cells]


MAKERS = (prediction, rounds, single_slo)
