"""Reproduce Figures 2, 8, 10, 11 and 12 of SLOs-Serve: steps and requests of single runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from page import Table
from slos_serve_systems import (
    CHATBOT,
    CODER,
    MIXED,
    OPT,
    OURS,
    PUBLISHED,
    SARATHI,
    SUMMARIZER,
    VLLM,
    Scenario,
    System,
    kept,
    two,
)

from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.plan import StepPlan
from jaxserve.sched.api.policy import Decision, View
from jaxserve.sched.perf import Perf, make
from jaxserve.sched.policies.slos_serve.policy import SlosServe
from jaxserve.sched.recorded.record import Recorder
from jaxserve.sched.sim import Report, simulate

SIZES = (0, 64, 128, 256, 512, 1024, 2048, 8192)  # edges of the histogram of tokens per step
NOISE = 0.05  # relative noise of the simulated devices' step times in Figure 10b
FORMS: tuple[Perf, ...] = (PUBLISHED, "roofline", "linear", "general")
STEPS = 4000  # half of them are fitted
INTERVALS = (1, 10, 60)  # seconds


def run(system: System, scenario: Scenario, rate: float, requests: int, noise: float | None = None) -> Run:
    recorder = Recorder()
    options = replace(system.under(scenario), noise=noise)
    report = simulate(
        scenario.workload, system.policy, system.mesh, scenario.latency, 0,
        qps=rate, num_requests=requests, options=options, recorder=recorder,
    )  # fmt: skip
    return Run(report, recorder)


class Run:
    """A simulation and its recorded steps."""

    def __init__(self, report: Report, recorder: Recorder) -> None:
        self.report = report
        self._recorder = recorder

    def steps(self) -> Iterator[tuple[Load, float]]:
        """Yield the load and the seconds of each step."""
        for one in self._recorder.stretches:
            yield load_of(one.plan, self._prompts), one.end - one.start

    @property
    def _prompts(self) -> dict[int, int]:
        return {id: request.prompt_length for id, request in self._recorder.requests.items()}


def load_of(plan: StepPlan, prompts: dict[int, int]) -> Load:
    """Return the load of a plan. A span that starts within its prompt is a chunk, any other a decode."""
    load = Load()
    for span in plan.spans:
        if span.start < prompts[span.request]:
            load = load.add_chunk(span.length, span.start)
        else:
            load = load.add_rows(span.length, span.start, span.start)
            load = load._replace(drafts=max(load.drafts, span.draft))
    return load


def batching(args: argparse.Namespace) -> Table:
    """Make Figure 2: throughput by the tokens of a step, of SLOs-Serve's steps."""
    rows: list[list[object]] = []
    steps = [
        one
        for scenario, rate in ((CHATBOT, 2.5), (SUMMARIZER, 2.0), (CODER, 4.0))
        for one in run(OURS, scenario, rate, 120).steps()
    ]
    tokens, seconds = np.array([load.tokens for load, _ in steps]), np.array([each for _, each in steps])
    for low, high in pairwise(SIZES):
        inside = (tokens > low) & (tokens <= high)
        if inside.any():
            rows.append(
                [
                    f"{low + 1}–{high}",
                    int(inside.sum()),
                    f"{1e3 * np.median(seconds[inside]):.1f}",
                    f"{tokens[inside].sum() / seconds[inside].sum():.0f}",
                ]
            )
    return Table(
        "Throughput over the tokens of a step (Figure 2)", ["tokens", "steps", "median time, ms", "tokens/s"], rows
    )


def traces(args: argparse.Namespace) -> Table:
    """Make Figure 8: burstiness of the drawn arrivals."""
    rows: list[list[object]] = []
    for label, scenario, published in (("conversation", CHATBOT, "stable"), ("code", CODER, "bursty")):
        arrivals = np.array([one.time for one in scenario.workload.draw(20_000, 5.0, 0)])
        cells: list[object] = [label, published]
        for seconds in INTERVALS:
            counts = np.bincount((arrivals / seconds).astype(int))
            cells.append(f"{counts.var() / counts.mean():.1f}")
        second = np.bincount(arrivals.astype(int))
        rows.append([*cells, int(np.percentile(second, 99)), int(second.max())])
    titles = ["arrivals", "paper", *(f"dispersion, {seconds} s" for seconds in INTERVALS), "p99 of a second", "most"]
    return Table("Arrivals as drawn, 20,000 at 5 requests/s (Figure 8)", titles, rows)


def sizes(args: argparse.Namespace) -> Table:
    """Make Figure 10a: the share of the execution time spent in steps above each number of tokens."""
    edges = SIZES[3:]
    rows: list[list[object]] = []
    for rate in (2.0, 3.0):
        for system in (SARATHI, OURS):
            steps = list(run(system, SUMMARIZER, rate, 200).steps())
            tokens, seconds = np.array([load.tokens for load, _ in steps]), np.array([each for _, each in steps])
            shares = [100 * seconds[tokens > edge].sum() / seconds.sum() for edge in edges[:-1]]
            rows.append([f"{rate:g}", system.label, *(f"{share:.0f}" for share in shares), int(tokens.max())])
    titles = ["req/s", "system", *(f"over {edge}, %" for edge in edges[:-1]), "largest step"]
    return Table("Execution time in steps of more tokens than so many, summarizer (Figure 10a)", titles, rows)


def fidelity(args: argparse.Namespace) -> Table:
    """Make Figure 10b: errors of step-time models, fitted to half of the steps, on the other half."""
    steps: list[tuple[Load, float]] = []
    for scenario, rate in ((CHATBOT, 2.5), (SUMMARIZER, 2.0), (CODER, 4.0), (MIXED, 3.5)):
        found = list(run(OURS, scenario, rate, 80, NOISE).steps())
        steps += found[: STEPS // 4]
    order = np.random.default_rng(0).permutation(len(steps))
    fitted, held = ([steps[at] for at in part] for part in (order[::2], order[1::2]))
    rows: list[list[object]] = []
    for form in FORMS:
        perf = make(form, points=fitted)
        errors = np.array([perf.step_time(load) / seconds - 1 for load, seconds in held])
        rows.append(
            [
                form,
                f"{100 * np.abs(errors).mean():.1f}",
                *(f"{100 * at:+.1f}" for at in np.percentile(errors, (5, 50, 95))),
            ]
        )
    titles = ["form", "mean error, %", "5 %", "median", "95 %"]
    return Table(
        f"Predicted over simulated step times, {len(held)} steps held out of the fit (Figure 10b)", titles, rows
    )


def burst(args: argparse.Namespace) -> Table:
    """Make Figure 11: coder above its capacity; the JSON also has the requests in the system over time."""
    rows: list[list[object]] = []
    curves: dict[str, object] = {}
    for rate in (4.5, 9.0):
        for system in (VLLM, SARATHI, OURS):
            made = run(system, CODER, rate, CODER.requests)
            measured, summary = made.report.measured, made.report.summary
            inside = sorted(one.ttft for one in measured if one.ttft_attained and one.window_attained)
            last = inside[int(0.99 * (len(inside) - 1))] if inside else float("nan")
            both, late = counts(made.report, everything=True), counts(made.report, everything=False)
            curves[f"{rate:g}, {system.label}"] = {"every second": both, "of them late": late}
            cells = (summary.ttft.p50, summary.ttft.p99, last, made.report.ended)
            rows.append([f"{rate:g}", system.label, f"{100 * kept(summary):.1f}", *map(two, cells), max(both)])
    titles = [
        "req/s",
        "system",
        "kept, %",
        "p50 TTFT s",
        "p99 TTFT s",
        "p99 of the kept s",
        "last ended s",
        "most at once",
    ]
    return Table("Coder in bursts (Figure 11)", titles, rows, {"in the system": curves})


def counts(report: Report, *, everything: bool) -> list[int]:
    """Return the number of requests in the system at each second: of all, or of those that miss an SLO."""
    some = [one for one in report.measured if everything or not (one.ttft_attained and one.window_attained)]
    seconds = np.arange(0.0, report.ended + 1.0)
    came = np.searchsorted(np.sort([one.arrival for one in some]), seconds, side="right")
    left = np.searchsorted(np.sort([one.ended for one in some]), seconds, side="right")
    result: list[int] = (came - left).tolist()
    return result


class Watched(SlosServe):
    """SLOs-Serve that records the requests that it demotes. Writer: `decide`."""

    demoted: set[int]

    def decide(self, view: View) -> Decision:
        decision = super().decide(view)
        self.demoted.update(decision.demote)
        return decision


def tails(args: argparse.Namespace) -> Table:
    """Make Figure 12: tail latencies of the mixed scenario, relative to each request's SLO."""
    rows: list[list[object]] = []
    for rate in (1.5, 3.0, 4.5):
        arrivals = MIXED.workload.draw(300, rate, 0)
        for system in (VLLM, SARATHI, OURS):
            demoted: set[int] = set()
            policy = type("Watching", (Watched,), {"demoted": demoted}) if system is OURS else system.policy
            report = simulate(
                MIXED.workload, policy, system.mesh, OPT, 0,
                qps=rate, num_requests=300, options=system.under(MIXED),
            )  # fmt: skip
            standard = [one for one in report.measured if one.id not in demoted]
            ttft = [one.ttft / arrivals[one.id].slo.ttft for one in standard]
            tpot = [one.window_tpot / arrivals[one.id].slo.tpot for one in standard]
            rows.append(
                [
                    f"{rate:g}",
                    system.label,
                    f"{100 * kept(report.summary):.1f}",
                    len(report.measured) - len(standard),
                    *(f"{p99(values):.2f}" for values in (ttft, tpot)),
                ]
            )
    titles = ["req/s", "system", "kept, %", "demoted", "p99 TTFT / SLO", "p99 TPOT / SLO"]
    return Table("Mixed: the 99th percentile of standard requests, over their SLO (Figure 12)", titles, rows)


def p99(values: Sequence[float]) -> float:
    finite = np.array(values)
    return float(np.percentile(finite[~np.isnan(finite)], 99))
