"""Reproduce FairBatching's Figures 1 (progress), 4 (arrivals) and 6, Table 4 (latencies), and section 3.2."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache

import numpy as np
import page
from fairbatching_runs import H20, MAIN, PROMPTS, SLOS, WORKLOADS, Job, Result, arrivals, every, rates, report
from page import Table

from jaxserve.report import plot
from jaxserve.sched.api.perf import Load
from jaxserve.sched.perf.fit import proportional
from jaxserve.sched.recorded.record import Recorder
from jaxserve.sched.recorded.timeline import decodes, prompt_lengths

SLO = SLOS["qwen"]
LOAD = 0.5  # share of the rate that prefill alone would allow: "medium"
KEPT = 5  # every fifth step is held out of the fits


def progress(args: argparse.Namespace) -> Table:
    """Make Figure 1: how far decodes are ahead of their TPOT while prompts miss their TTFT."""
    (rate,) = rates("qwen", H20, [LOAD])
    systems = {name: MAIN[name] for name in ("vLLM", "Sarathi", "FB")}
    found = page.spread(args, _progress, [Job(one, "qwen", rate, args.requests or 400) for one in systems.values()])
    panels = []
    shown = (("decode ahead of TPOT", 1, "tokens"), ("prefill", 2, "tokens/s"), ("decode", 3, "tokens/s"))
    for title, index, what in shown:
        lines = {name: plot.Series(one[0], one[index]) for name, one in zip(systems, found, strict=True)}
        panels.append(plot.Panel(title, "seconds", what, lines))
    page.picture("fairbatching-figure1.png", panels, 3)
    rows = [[name, *one[4]] for name, one in zip(systems, found, strict=True)]
    titles = ["system", "tokens ahead: P5", "P50", "P95", "prompt tokens/s where prompts wait", "decode tokens/s there"]
    more = ["decode tokens/s otherwise", "TTFT attained, %", "TPOT attained, %"]
    return Table(f"Progress at {rate} requests/s, Qwen3-14B on H20, QwenTrace (Figure 1)", [*titles, *more], rows)


Curve = list[float]


def _progress(job: Job) -> tuple[Curve, Curve, Curve, Curve, list[float]]:
    recorder = Recorder()
    measured = report(job, recorder).measured
    first, last = (np.quantile([one.arrival for one in measured], share) for share in (0.1, 0.9))
    seconds = np.arange(np.ceil(first), np.floor(last))
    ahead, prompts, rows, waiting = (np.zeros(len(seconds)) for _ in range(4))
    for request in recorder.requests.values():
        times = np.array(request.token_times)
        out = np.searchsorted(times, seconds, side="right")
        busy = (out > 0) & (out < len(times))
        ahead[busy] += (out - 1 - (seconds - times[0]) / request.slo.tpot)[busy] if len(times) else 0.0
        waiting += (request.arrival <= seconds) & (out == 0)
    lengths = prompt_lengths(recorder)
    for stretch in recorder.stretches:
        at = int(stretch.end - seconds[0])
        if 0 <= at < len(seconds):
            chunk = sum(span.length for span in stretch.plan.spans if not decodes(span, lengths))
            prompts[at] += chunk
            rows[at] += sum(span.length for span in stretch.plan.spans) - chunk
    some = waiting > 0
    kept = [100 * float(np.mean([one.ttft_attained for one in measured]))]
    kept.append(100 * float(np.mean([one.worst_attained for one in measured])))
    split = [float(prompts[some].mean()), float(rows[some].mean()), float(rows[~some].mean()) if (~some).any() else 0.0]
    summary = [*np.percentile(ahead, (5, 50, 95)).tolist(), *split, *kept]
    shown = slice(0, 120)
    return (
        (seconds[shown] - seconds[0]).tolist(),
        ahead[shown].tolist(),
        prompts[shown].tolist(),
        rows[shown].tolist(),
        summary,
    )


def arrival_counts(args: argparse.Namespace) -> Table:
    """Make Figure 4: burstiness of arrivals, as drawn here and, with `--trace`, in the heads of the traces."""
    rows: list[list[object]] = []
    files = dict(args.trace)
    for workload, name in WORKLOADS.items():
        (rate,) = rates(workload, H20, [LOAD])
        for label, path in (("drawn", ""), *((("trace", files[workload]),) if workload in files else ())):
            given = arrivals(Job("", workload, rate, args.requests or 1000, slo=SLOS[workload], trace=path))
            drawn = given if isinstance(given, list) else given.draw(args.requests or 1000, rate, 0)
            times = np.array([one.time for one in drawn])
            times = (times - times[0]) * (len(times) - 1) / (times[-1] - times[0]) / rate
            cells = []
            for window in (1.0, 10.0, 60.0):
                counts = np.bincount((times // window).astype(int))[:-1]
                cells.append(float(counts.var() / counts.mean()) if len(counts) > 1 else float("nan"))
            second = np.bincount(times.astype(int))
            rows.append([name, label, rate, *cells, float(second.mean()), int(second.max())])
    titles = [
        "workload",
        "",
        "requests/s",
        "variance / mean in 1 s",
        "in 10 s",
        "in 60 s",
        "mean of 1 s",
        "most in 1 s",
    ]
    return Table("Arrivals, stretched to the same rate (Figure 4)", titles, rows)


@cache
def at_2_5(jobs: int, requests: int) -> dict[str, Result]:
    """Simulate the cases of Table 4 and Figure 6."""
    made = every(argparse.Namespace(jobs=jobs), [Job(system, "qwen", 2.5, requests) for system in MAIN.values()])
    return dict(zip(MAIN, made, strict=True))


def table4(args: argparse.Namespace) -> Table:
    paper = {
        "vLLM": (212, 1061, 1842, 26, 256, 614),
        "Sarathi": (377, 2455, 4585, 29, 46, 49),
        "FB": (213, 1053, 1998, 27, 50, 50),
        "FB-PAB": (198, 500, 504, 23, 50, 50),
    }
    rows: list[list[object]] = []
    for name, result in at_2_5(args.jobs, args.requests or 1000).items():
        served = np.isfinite(result.ttft)
        ours = [
            round(1e3 * float(value))
            for column in (result.ttft, result.tpot)
            for value in np.percentile(np.array(column)[served], (50, 95, 99))
        ]
        rows += [[name, "ours", *ours, result.effective()], [name, "paper", *paper[name], None]]
    titles = ["system", "", *(f"{what} P{p}" for what in ("TTFT", "TPOT") for p in (50, 95, 99)), "effective/s"]
    return Table("Table 4: ms at 2.5 requests/s, Qwen3-14B on H20, QwenTrace", titles, rows)


TTFT_BINS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
TPOT_BINS = (0.02, 0.03, 0.04, 0.0501, 0.1, 0.25)


def figure6(args: argparse.Namespace) -> Table:
    """Make Figure 6: distributions of TTFT and TPOT in the runs of Table 4."""
    rows: list[list[object]] = []
    for name, result in at_2_5(args.jobs, args.requests or 1000).items():
        served = np.isfinite(result.ttft)
        for what, values, bins in (("TTFT", result.ttft, TTFT_BINS), ("TPOT", result.tpot, TPOT_BINS)):
            counts, _ = np.histogram(np.array(values)[served], (-1.0, *bins, np.inf))
            rows.append([name, what, *(f"{100 * one / len(served):.1f}" for one in counts), int((~served).sum())])
    limits = [f"to {1e3 * a:.0f} / {1e3 * b:.0f} ms" for a, b in zip(TTFT_BINS, TPOT_BINS, strict=True)]
    titles = ["system", "of", *limits, "more", "refused"]
    return Table("Figure 6: % of requests by TTFT / TPOT, at 2.5 requests/s", titles, rows)


def estimates(args: argparse.Namespace) -> Table:
    """Make the table of section 3.2: errors of step times fitted to tokens alone, and to tokens and context."""
    jobs = [
        Job(MAIN[name], workload, rates(workload, H20, [LOAD])[0], args.requests or 200, slo=SLOS[workload])
        for workload in PROMPTS
        for name in ("Sarathi", "FB")
    ]
    titles = ["workload", "system", "steps", "tokens: mean error, %", "P99", "tokens and context: mean error, %", "P99"]
    more = ["prompt and decode tokens and context", "P99"]
    return Table("Errors of fitted step times (section 3.2)", [*titles, *more], page.spread(args, _estimates, jobs))


def _estimates(job: Job) -> list[object]:
    recorder = Recorder()
    report(job, recorder)
    lengths = prompt_lengths(recorder)
    loads, times = [], []
    for stretch in recorder.stretches:
        load = Load()
        for span in stretch.plan.spans:
            row = decodes(span, lengths)
            load = load.add_decode(span.start) if row else load.add_chunk(span.length, span.start)
        loads.append(load)
        times.append(stretch.end - stretch.start)
    seconds = np.array(times)
    forms = (
        [(1.0, one.tokens) for one in loads],
        [(1.0, one.tokens, one.context + one.prefix) for one in loads],
        [(1.0, one.prefill, one.decode, one.context + one.prefix) for one in loads],
    )
    cells = [value for form in forms for value in _errors(np.array(form, dtype=float), seconds)]
    name = next(name for name, system in MAIN.items() if system == job.system)
    return [WORKLOADS[job.workload], name, len(seconds), *cells]


def _errors(table: np.ndarray, seconds: np.ndarray) -> Sequence[str]:
    """Return the mean and 99th percentile of the errors in % on held-out steps."""
    judged = np.arange(len(seconds)) % KEPT == KEPT - 1
    fitted = proportional(table[~judged], seconds[~judged])
    errors = np.abs(table[judged] @ fitted / seconds[judged] - 1)
    return f"{100 * errors.mean():.1f}", f"{100 * np.percentile(errors, 99):.1f}"


MAKERS = (progress, arrival_counts, table4, figure6, estimates)
