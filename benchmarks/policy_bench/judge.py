"""Figures of a served run: attainment, a simulation of the same requests, and errors of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from jaxserve.bench import result
from jaxserve.bench.drive import Run
from jaxserve.bench.load import Call
from jaxserve.sched import policies
from jaxserve.sched.journal import Replay, Step
from jaxserve.sched.metrics import summarize
from jaxserve.sched.perf.fit import kind
from jaxserve.sched.perf.recipe import Recipe
from jaxserve.sched.sim import Mesh, Options, simulate
from jaxserve.sched.sim.again import measured_latency

from .mixes import arrivals

LEARNED = 200  # steps after which the errors of predictions count
KINDS = ("decode", "prefill", "mixed")
OTHER = "table"  # Kairos's step-time model, for comparison


def attained(run: Run) -> dict[str, Any]:
    """Return attained shares and rates as measured by the clients. A failed request attains nothing."""
    found = result.summary(run.outcomes, run.duration, goals=result.Goals())
    names = sorted({one.call.slo.name for one in run.outcomes})
    kept = dict.fromkeys(names, 0)
    for one in run.outcomes:
        kept[one.call.slo.name] += all(result.Goals().kept(one).values())
    return {
        "attained": found["slo_attainment"],
        "goodput": found["request_goodput"],
        "seconds": run.duration,
        "failed": found["failed"],
        "ttft": found["slo_attainment_by_metric"]["ttft"],
        "tpot": found["slo_attainment_by_metric"]["tpot"],
        "tbt": found["slo_attainment_by_metric"].get("tbt"),
        "classes": {
            name: {"attained": found["slo_attainment_by_class"][name], "goodput": kept[name] / run.duration}
            for name in names
        },
        **{key: found[key] for key in ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms")},
        "median_client_lag_ms": found["median_client_lag_ms"],
    }


def simulated(
    calls: Sequence[Call], journal: Replay, policy: str, mesh: Mesh, layers: int, routing: str, perf: Any, seed: int
) -> dict[str, Any]:
    """Simulate the same requests with the same scheduler and the step times and noise of the served run."""
    latency, fitted = measured_latency(journal)
    limits = next(iter(journal.instances.values()))["limits"]
    options = Options(
        tokens=limits["tokens"], rows=limits["rows"], routing=policies.routing(policy, routing),
        prefix_caching=False, perf=perf,
    )  # fmt: skip
    report = simulate(arrivals(calls), policy, mesh, replace(latency, layers=layers), seed, options=options)
    whole = summarize(report.measured)
    return {
        "attained": whole.attained,
        "ttft": whole.ttft_attained,
        "tpot": whole.tpot_attained,
        "goodput": sum(one.attained for one in report.measured) / report.ended,
        "classes": {name: share.attained for name, share in whole.by_class.items()},
        "busy": list(report.busy),
        "fit_mape": fitted.mape,
        "noise": latency.noise,
    }


def steps(journal: Replay) -> dict[str, Any]:
    """Return the errors of predicted step times by kind of step, and those of OTHER on the same profile and steps.

    Skips the first LEARNED steps of all instances, or the first half if there are fewer than twice as many.
    """
    ordered = sorted(journal.steps, key=lambda step: step.ended)
    after = min(LEARNED, len(ordered) // 2)
    return {"after": after, **_errors(ordered[after:]), OTHER: _errors(_told(journal, ordered)[after:])}


def _told(journal: Replay, ordered: Sequence[Step]) -> list[Step]:
    """Return the steps with OTHER's predictions, each made before OTHER learns from the step."""
    models = {
        name: replace(Recipe.of(made["perf"]), kind=OTHER, coefficients=None).make()
        for name, made in journal.instances.items()
    }
    told = []
    for step in ordered:
        model = models[step.instance]
        told.append(step._replace(predicted=model.step_time(step.load)))
        model.observe(step.load, step.seconds)
    return told


def _errors(some: Sequence[Step]) -> dict[str, Any]:
    """Return the count, MAPE and median ratio of predicted to measured time for each kind of step that occurs."""
    made = {}
    for name in KINDS:
        ratios = [one.predicted / one.seconds for one in some if kind(one.load) == name and one.seconds > 0]
        if ratios:
            mape = sum(abs(ratio - 1) for ratio in ratios) / len(ratios)
            made[name] = {"steps": len(ratios), "mape": mape, "ratio": median(ratios)}
    return made


def first_tokens(predicted: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
    """Return the median relative error of TTFT predictions: of all, of those that ended later, and by path."""
    errors = [(path, abs(at - measured) / measured) for path, at, measured in predicted if measured > 0]
    paths = {path: [error for one, error in errors if one == path] for path in sorted({path for path, _ in errors})}
    every = [error for _, error in errors]
    return {
        "requests": len(every),
        "median_error": median(every) if every else None,
        "later": median(every[len(every) // 2 :]) if every else None,
        "paths": {path: {"requests": len(some), "median_error": median(some)} for path, some in paths.items()},
    }


def busy(journal: Replay, run: Run) -> dict[str, float]:
    """Return the share of the run's time in which each instance computed."""
    spent: dict[str, float] = dict.fromkeys(journal.instances, 0.0)
    for step in journal.steps:
        spent[step.instance] += step.seconds
    return {name: seconds / run.duration for name, seconds in spent.items()}
