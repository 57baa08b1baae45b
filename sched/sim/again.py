"""Simulation of a served run from its journal: the same requests and schedulers, with step times fitted to it.

Both runs share the scheduler. They differ in everything that the step-time model leaves out: host time
between steps, and instances that share cores.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..api.errors import InvalidValue
from ..api.perf import Form
from ..api.request import Request
from ..journal import REHEARSAL, Replay
from ..metrics import Summary, measure, stage_allowance, summarize
from ..perf.buckets import Padded
from ..perf.fit import Fit, fit, to_total
from ..perf.recipe import Recipe
from .latency import Latency
from .options import Mesh, Options
from .simulate import Report, simulate
from .workload import Arrival


class Again(NamedTuple):
    """A served run and its simulation side by side."""

    served: Summary
    simulated: Report
    fit: Fit
    noise: float  # standard deviation of log(measured / fitted) over steps
    busy: tuple[float, ...]  # share of the served run in which each instance computed


def again(replayed: Replay, seed: int = 0) -> Again:
    """Simulate the run recorded in a journal. Raises InvalidValue if no request in it has finished."""
    requests = sorted(replayed.requests.values(), key=lambda request: (request.arrival, request.id))
    done = [request for request in requests if request.finish_reason in ("stop", "length") and request.key != REHEARSAL]
    if not done:
        raise InvalidValue("no request of the journal has finished", "journal")
    instances = list(replayed.instances.values())
    latency, fitted = measured_latency(replayed)
    limits = instances[0]["limits"]
    mesh = Mesh.parse(
        f"{len(instances)}x1",
        prefill=sum(instance["role"] == "prefill" for instance in instances) or None,
        colocated=any(instance["role"] == "mixed" for instance in instances),
    )
    options = Options(
        perf=instances[0]["perf"]["kind"],
        tokens=limits["tokens"],
        rows=limits["rows"],
        prompts=limits["prompts"],
        suspended=limits["suspended"],
        stop_within=limits["stop_within"],
        prefix_caching=instances[0]["prefix_caching"],
        **instances[0]["options"],
    )
    first = done[0].arrival
    arrivals = [_arrival(request, first, limits["page_size"], replayed.thoughts.get(request.id, 0)) for request in done]
    report = simulate(arrivals, instances[0]["policy"], mesh, latency, seed, options=options)
    served = summarize(tuple(measure(request, request.class_, stage_allowance(request)) for request in done))
    busy = _busy(replayed, first, max(request.token_times[-1] for request in done))
    return Again(served, report, fitted, latency.noise, busy)


def measured_latency(replayed: Replay) -> tuple[Latency, Fit]:
    """Derive the latency preset of a served run from its measured steps, and report the quality of the fit.

    Raises InvalidValue if no step was measured.
    """
    instance = next(iter(replayed.instances.values()))
    recipe, limits = Recipe.of(instance["perf"]), instance["limits"]
    fitted = fit(replayed.timed, recipe.p_moe, recipe.buckets)
    truth = to_total(fitted.coefficients, replayed.timed, recipe.buckets)
    latency = Latency(
        name="measured",
        kv_bytes_per_token=0,  # the latency covers the whole transfer
        kv_tokens=limits["pages"] * limits["page_size"],
        page_size=limits["page_size"],
        coefficients=truth,
        link_latency=min(replayed.moves, default=0.0),  # longer ones include waiting for the target's running step
        noise=min(noise(replayed, Padded(truth, recipe.buckets)), 0.99),
        buckets=recipe.buckets,
    )
    return latency, fitted


def noise(replayed: Replay, truth: Form) -> float:
    """Return the standard deviation of log(measured / fitted).

    Steps that the fit predicts to take no time, which happens with few steps, are not counted.
    """
    pairs = [(seconds, truth.step_time(load)) for load, seconds in replayed.timed]
    errors = [np.log(measured / fitted) for measured, fitted in pairs if measured > 0 and fitted > 0]
    return float(np.std(errors)) if errors else 0.0


def _busy(replayed: Replay, first: float, last: float) -> tuple[float, ...]:
    """Return the share of the time from `first` to `last` that each instance computed. Rehearsals came before."""
    spent = dict.fromkeys(replayed.instances, 0.0)
    for step in replayed.steps:
        if first < step.ended <= last:
            spent[step.instance] += step.seconds
    return tuple(seconds / (last - first) for seconds in spent.values())


def _arrival(request: Request, first: float, page_size: int, thoughts: int) -> Arrival:
    """Convert a request. Its pages keep their digests, so that prefixes are shared as in the served run."""
    pages = request.digests[: request.prompt_length // page_size]
    return Arrival(
        request.arrival - first,
        request.prompt_length,
        len(request.output),
        request.slo,
        request.class_,
        hash_ids=tuple(int.from_bytes(digest[:4], "big") for digest in pages),
        block=page_size,
        thinking_tokens=thoughts if request.slo.stages else 0,
    )


SHOWN = (
    "attained", "ttft_attained", "tpot_attained", "ttft.p50", "ttft.p99", "tpot.p50", "tpot.p99", "largest_gap.p99",
    "latency.p50", "output_throughput", "median_speed",
)  # fmt: skip


def rows(outcome: Again) -> list[tuple[str, float, float]]:
    """Return the rows (name, served, simulated) of a table, in shares, seconds and tokens per second."""
    return [(name, _field(outcome.served, name), _field(outcome.simulated.summary, name)) for name in SHOWN]


def _field(summary: Summary, name: str) -> float:
    value: object = summary.as_dict()
    for key in name.split("."):
        assert isinstance(value, dict)
        value = value[key]
    assert isinstance(value, int | float)
    return float(value)
