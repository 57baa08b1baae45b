"""What a served run was worth, what the simulator says of the same requests, and how well both were predicted."""

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

LEARNED = 200  # steps of a run after which its predictions count
KINDS = ("decode", "prefill", "mixed")
OTHER = "table"  # Kairos's form


def attained(run: Run) -> dict[str, Any]:
    """Shares and rates as the clients saw them; a request that failed attained nothing."""
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
    """The same requests under the same scheduler, on instances with the step times and the noise of that run."""
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
    """Errors of predicted step times by kind of step, after LEARNED steps of all instances, or after half of them
    where there are fewer than twice as many; beside them those of OTHER, from the same profile and the same steps."""
    ordered = sorted(journal.steps, key=lambda step: step.ended)
    after = min(LEARNED, len(ordered) // 2)
    return {"after": after, **_errors(ordered[after:]), OTHER: _errors(_told(journal, ordered)[after:])}


def _told(journal: Replay, ordered: Sequence[Step]) -> list[Step]:
    """The steps as OTHER would have predicted them, each before it learned from it."""
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
    """mape, and the median of predicted by measured, of each kind of step that there is."""
    made = {}
    for name in KINDS:
        ratios = [one.predicted / one.seconds for one in some if kind(one.load) == name and one.seconds > 0]
        if ratios:
            mape = sum(abs(ratio - 1) for ratio in ratios) / len(ratios)
            made[name] = {"steps": len(ratios), "mape": mape, "ratio": median(ratios)}
    return made


def first_tokens(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Median absolute error of first tokens as predicted at admission, as a share of when they came: of all requests,
    and of the later half to end."""
    errors = [abs(predicted - measured) / measured for predicted, measured in pairs if measured > 0]
    later = errors[len(errors) // 2 :]
    return {
        "requests": len(errors),
        "median_error": median(errors) if errors else None,
        "later": median(later) if later else None,
    }


def busy(journal: Replay, run: Run) -> dict[str, float]:
    """Share of the run's time that each instance computed."""
    spent: dict[str, float] = dict.fromkeys(journal.instances, 0.0)
    for step in journal.steps:
        spent[step.instance] += step.seconds
    return {name: seconds / run.duration for name, seconds in spent.items()}
