"""Reproduce FlowPrefill's preemption in the simulator: blocking time (Figure 12), prompts beside decodes (Figure 16).

Steps are cut and dispatched as in the engine (sched/api/preemption.py), unless a row says otherwise. In Figure 12 every
request ends with its first token, as in flowprefill.py. Figure 16 uses the colocated workload on one mixed instance:
three times the TTFT, and a TBT of 100 ms for text and images, 200 ms for searches and files (section 6.5).

    python benchmarks/reproduce/flowprefill_stops.py all    # tables of docs/research/flowprefill.md and its JSON
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np
import page
from flowprefill_systems import LLAMA_8B, WHOLE, Prompts, System, ttft
from page import Table

from jaxserve.sched.api.slo import SLO
from jaxserve.sched.sim import Arrival, Options, Report, simulate
from jaxserve.sched.sim.scenarios import flowprefill

RATE = 5.0  # requests/s of Figure 12
RATES = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)  # of Figure 16
LATENCY = LLAMA_8B.latency
COLOCATED = flowprefill(LLAMA_8B.model, colocated=True)
VARIED, NOISE = 4.0, (0.05, 0.15)  # requests/s; standard deviation of a step's factor
REQUESTS, SEEDS = 300, (0, 1)
LONG = 131_072  # tokens
CUTS: Mapping[str, dict[str, Any]] = {
    "5 operators a layer, no lead (the paper's)": {
        "boundary": "op", "segments": LATENCY.layers * LATENCY.operators, "lead": 0.0, "tokens": WHOLE
    },
    **{boundary: {"boundary": boundary} for boundary in ("op", "layer")},
    **{f"{boundary}, within 10 ms": {"boundary": boundary, "stop_within": 0.01} for boundary in ("op", "layer")},
}  # fmt: skip


class Stopwatch:
    """Seconds from each request to stop a step until it has stopped. Writer: the log of an instance."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._asked = 0.0

    def __call__(self, name: str, *_: object) -> Callable[..., None]:
        def log(kind: str, **fields: Any) -> None:
            if kind == "interrupts":
                self._asked = fields["now"]
            elif kind == "suspend":
                self.seconds.append(fields["result"].at - self._asked)

        return log


def _blocked() -> Iterator[System]:
    """Yield the rows of Figure 12."""
    operators = {"boundary": "op", "segments": LATENCY.layers * LATENCY.operators, "lead": 0.0}
    yield System(f"{LATENCY.operators} operators a layer, no lead (the paper's)", "flowprefill", operators)
    for boundary in ("op", "layer"):
        yield System(f"{boundary}, no lead", "flowprefill", {"boundary": boundary, "lead": 0.0})
    for boundary in ("op", "layer", "layers:4", "chunk"):
        yield System(boundary, "flowprefill", {"boundary": boundary})
    for boundary in ("op", "layer"):
        yield System(f"{boundary}, within 10 ms", "flowprefill", {"boundary": boundary, "stop_within": 0.01})
    for tokens in (8192, 2048):
        for boundary in ("op", "layer", "chunk"):
            options = {"boundary": boundary, "tokens": tokens}
            yield System(f"{boundary}, chunks of {tokens:,}", "flowprefill", options)


def blocking(args: argparse.Namespace) -> Table:
    """Make Figure 12: time until a step stops, and its effect on attainment and goodput."""
    columns = ["boundary", "stops", "mean, ms", "largest, ms", "attained, %", "goodput"]
    rows = page.spread(args, _stopped, list(_blocked()))
    return Table(f"Blocking time at {RATE} requests/s (Figure 12)", columns, rows)


def _stopped(system: System) -> list[object]:
    watch = Stopwatch()
    share = fmean(ttft(report.summary) for report in system.run(RATE, logs=watch))
    ms = [1e3 * seconds for seconds in watch.seconds]
    waits = [f"{fmean(ms):.1f}", f"{max(ms):.0f}"] if ms else [None, None]
    return [system.label, len(ms), *waits, f"{100 * share:.1f}", system.goodput()]


def behind(args: argparse.Namespace) -> Table:
    """Measure how long stops take that a prompt of 128K tokens must make for short ones."""
    columns = ["cut", "stops", "p50, ms", "p99, ms", "short prompts on time, %"]
    rows = page.spread(args, _behind, list(CUTS))
    return Table(f"Waits of stops behind a prompt of {LONG:,} tokens", columns, rows)


def _behind(label: str) -> list[object]:
    first = Arrival(0.0, LONG, 1, SLO(ttft=300.0, tpot=1.0))
    watch, on_time = Stopwatch(), []
    for seed in SEEDS:
        short = [replace(prompt, time=prompt.time + 0.1) for prompt in Prompts().draw(100, 2.0, seed)]
        report = simulate(
            [first, *(prompt for prompt in short if prompt.prompt_tokens < 4096)], "flowprefill", "1x1", LATENCY, seed,
            options=Options(**{"perf": "poly", "pages": 1 << 16, **CUTS[label]}), logs=watch,
        )  # fmt: skip
        on_time += [request.ttft_attained for request in report.measured[1:]]
    p50, p99 = (f"{1e3 * wait:.1f}" for wait in np.percentile(watch.seconds, [50, 99]))
    return [label, len(watch.seconds), p50, p99, f"{100 * fmean(on_time):.1f}"]


@dataclass(frozen=True)
class Mixed:
    """A row of Figure 16: a policy on one mixed instance."""

    label: str
    policy: str
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, rate: float, seed: int) -> Report:
        options = Options(**{"perf": "poly", "boundary": "op", **self.options})
        return simulate(COLOCATED, self.policy, "1x1", LATENCY, seed, qps=rate, num_requests=REQUESTS, options=options)


MIXED = (
    Mixed("FlowPrefill, op", "flowprefill"),
    Mixed("FlowPrefill, layer", "flowprefill", {"boundary": "layer"}),
    Mixed("FlowPrefill, op, whole prompts", "flowprefill", {"tokens": WHOLE}),
    Mixed("FlowPrefill's order, no stops", "flowprefill:no-preempt", {"boundary": "chunk"}),
    Mixed("vLLM-CP2K", "sarathi:tokens=2048", {"boundary": "chunk"}),
    Mixed("vLLM-CP2K, prompts first", "vllm:tokens=2048", {"boundary": "chunk", "tokens": 2048}),
)


def colocated(args: argparse.Namespace) -> Table:
    """Make Figure 16: shares of requests that attain their TTFT and their TBT, by rate."""
    cells = iter(page.spread(args, _attained, [(system, rate) for system in MIXED for rate in RATES]))
    rows = [[system.label, *(next(cells) for _ in RATES)] for system in MIXED]
    columns = ["system", "1 request/s", *(f"{rate:g}" for rate in RATES[1:])]
    return Table("TTFT / TBT attained by requests/s, % (Figure 16)", columns, rows)


def _attained(case: tuple[Mixed, float]) -> str:
    system, rate = case
    summaries = [system.run(rate, seed).summary for seed in SEEDS]
    ttft = fmean(summary.ttft_attained for summary in summaries)
    tbt = fmean(summary.tpot_attained for summary in summaries)  # the TPOT objective equals the TBT, which decides
    return f"{100 * ttft:.1f} / {100 * tbt:.1f}"


def varying(args: argparse.Namespace) -> Table:
    """Make Figure 16 at one rate with unpredictable step times: lognormal factors of mean 1."""
    noisy = [replace(system, options={**system.options, "noise": noise}) for system in MIXED for noise in NOISE]
    cells = iter(page.spread(args, _attained, [(system, VARIED) for system in noisy]))
    rows = [[system.label, *(next(cells) for _ in NOISE)] for system in MIXED]
    columns = ["system", *(f"step times vary by {100 * noise:.0f} %" for noise in NOISE)]
    return Table(f"TTFT / TBT attained at {VARIED:g} requests/s, %", columns, rows)


if __name__ == "__main__":
    raise SystemExit(page.run(__doc__, "flowprefill", (blocking, behind, colocated, varying), sized=False))
