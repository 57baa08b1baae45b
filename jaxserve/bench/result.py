"""Metrics computed from outcomes, with the keys of `vllm bench serve`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import numpy as np

from jaxserve.bench.client import Outcome
from jaxserve.errors import InvalidValue
from jaxserve.sched.api.slo import ANSWER, THINKING
from jaxserve.sched.metrics import Measured, summarize

METRICS = ("ttft", "tpot", "itl", "e2el")
STAGES = (THINKING, ANSWER)


@dataclass(frozen=True, slots=True)
class Goals:
    """Objectives in milliseconds of requests without their own: `--goodput ttft:500 tpot:50`."""

    limits: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Goals:
        limits: dict[str, float] = {}
        for text in texts:
            metric, _, value = text.partition(":")
            try:
                limits[metric] = float(value)
            except ValueError as error:
                raise InvalidValue(f"goodput={text!r} must read METRIC:MILLISECONDS", "goodput") from error
            if metric not in ("ttft", "tpot", "tbt", "e2el") or not limits[metric] > 0:
                raise InvalidValue(
                    f"goodput={text!r} must name ttft, tpot, tbt or e2el and a positive number", "goodput"
                )
        return cls(limits)

    def of(self, outcome: Outcome) -> dict[str, float]:
        """Return the objectives of a request; its own take precedence.

        A request with stage objectives is judged by those instead of TPOT, or by neither if only the server knows
        each token's stage.
        """
        slo = outcome.call.slo
        held = {**self.limits, **slo.limits}
        if slo.stages:
            known, tpot = thoughts(outcome) is not None, held.pop("tpot", None)
            for stage in STAGES:
                limit = held.pop(stage, tpot)
                if known and limit is not None:
                    held[stage] = limit
        return held

    def kept(self, outcome: Outcome) -> dict[str, bool]:
        """Return which objectives the request met; a failed request met none."""
        return {metric: outcome.ok and milliseconds(outcome, metric) <= v for metric, v in self.of(outcome).items()}


def thoughts(outcome: Outcome) -> int | None:
    """Return the leading chunks of an output that are thinking, or None if neither server nor workload tells."""
    if outcome.thoughts is None and outcome.call.thinking_tokens:
        chunks = len(outcome.itls) + 1
        return round(outcome.call.thinking_tokens * chunks / max(outcome.output_tokens, 1))
    return outcome.thoughts


def milliseconds(outcome: Outcome, metric: str) -> float:
    """Return ttft, tpot, tbt (the largest gap), e2el, or the mean per token of a stage.

    All but ttft and e2el are 0 without a second token (of the stage).
    """
    if metric in STAGES:
        split = max((thoughts(outcome) or 0) - 1, 0)  # the gap before the first answer token is the answer's
        gaps = outcome.itls[:split] if metric == THINKING else outcome.itls[split:]
        tokens = len(gaps) * outcome.output_tokens / (len(outcome.itls) + 1)  # a chunk may carry several
        return sum(gaps) / tokens * 1e3 if tokens else 0.0
    if metric == "tbt":
        return max(outcome.itls, default=0.0) * 1e3
    seconds = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}[metric]
    return seconds * 1e3


def samples(outcomes: Sequence[Outcome], metric: str) -> list[float]:
    """Return the milliseconds of all successful requests: one per request, or one per gap for itl."""
    good = [outcome for outcome in outcomes if outcome.ok]
    if metric == "itl":
        return [gap * 1e3 for outcome in good for gap in outcome.itls]
    if metric == "client_lag":
        return [outcome.lag * 1e3 for outcome in outcomes]
    if metric in ("tpot", "tbt"):
        good = [outcome for outcome in good if outcome.output_tokens > 1]
    return [milliseconds(outcome, metric) for outcome in good]


def percentile_name(percentile: float) -> str:
    return f"p{int(percentile) if percentile == int(percentile) else percentile}"


def statistics(values: Sequence[float], metric: str, percentiles: Sequence[float]) -> dict[str, float]:
    """Return {mean,median,std,p99,...}_{metric}_ms; zeros without samples, as in vLLM."""
    data = np.asarray(values or [0.0])
    figures = {"mean": data.mean(), "median": np.median(data), "std": data.std()}
    figures |= {percentile_name(p): np.percentile(data, p) for p in percentiles}
    return {f"{name}_{metric}_ms": float(value) for name, value in figures.items()}


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    marks = [(outcome.start, 1) for outcome in outcomes] + [(o.start + o.latency, -1) for o in outcomes]
    running = most = 0
    for _, change in sorted(marks):
        running += change
        most = max(most, running)
    return most


def peak_output_rate(outcomes: Sequence[Outcome]) -> float:
    """Return the most tokens that arrived within one second of the clock, over all requests."""
    seconds: Counter[int] = Counter()
    for outcome in outcomes:
        at = outcome.start + outcome.ttft
        seconds[int(at)] += 1
        for gap in outcome.itls:
            at += gap
            seconds[int(at)] += 1
    return float(max(seconds.values(), default=0))


def attainment(outcomes: Sequence[Outcome], goals: Goals) -> dict[str, Any]:
    """Return the shares of sent requests that met their objectives, in total and by objective."""
    kept = [goals.kept(outcome) for outcome in outcomes]
    held = [item for item in kept if item]
    if not held:
        return {}
    metrics = sorted({metric for item in held for metric in item})
    by_metric = {m: float(np.mean([item[m] for item in held if m in item])) for m in metrics}
    judged = [measured(n, o, item) for n, (o, item) in enumerate(zip(outcomes, kept, strict=True)) if item]
    shares = summarize(judged)
    return {
        "slo_attainment": shares.attained,
        "slo_attainment_by_metric": by_metric,
        "slo_attainment_by_class": {name: share.attained for name, share in shares.by_class.items()},
        "slo_attainment_by_prompt_length": {n: s.attained for n, s in shares.by_length.items() if s.requests},
        "slo_attainment_token_weighted": shares.token_weighted,
        "goodput_slos_ms": dict(goals.limits),
    }


def measured(number: int, outcome: Outcome, kept: Mapping[str, bool]) -> Measured:
    """Convert an outcome to the simulator's form, so that the same code computes shares."""
    gap = max(outcome.itls, default=nan)
    good, some = outcome.ok, outcome.ok and outcome.output_tokens > 1
    return Measured(
        id=number,
        class_=outcome.call.slo.name,
        arrival=outcome.start,
        prompt=outcome.prompt_tokens or outcome.call.prompt_tokens,
        output=outcome.output_tokens,
        ttft=outcome.ttft if good else inf,
        tpot=outcome.tpot if some else nan,
        worst_tpot=nan,  # needs the time of every token, but a chunk may carry several
        window_tpot=nan,
        largest_gap=gap,
        ended=outcome.start + outcome.latency if good else nan,
        reason="length" if good else "error",
        ttft_attained=good and kept.get("ttft", True) and kept.get("e2el", True),
        tpot_attained=good and all(kept.get(metric, True) for metric in ("tpot", "tbt", *STAGES)),
    )


def by_class(outcomes: Sequence[Outcome], goals: Goals, percentiles: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Return requests, attainment, objectives and percentiles of each class, if there are classes.

    Latencies in ms. `tbt` is the largest gap of a request. `slo_attainment` is None without an objective.
    """
    names = list(dict.fromkeys(outcome.call.slo.name for outcome in outcomes))
    summaries: dict[str, dict[str, Any]] = {}
    for name in sorted(names) if any(names) else ():
        own = [outcome for outcome in outcomes if outcome.call.slo.name == name]
        first = own[0].call.slo
        shares = attainment(own, goals)
        summaries[name or "(none)"] = {
            "requests": len(own),
            "failed": sum(not outcome.ok for outcome in own),
            "tier": first.service_tier,
            "slos_ms": _common([{**goals.limits, **outcome.call.slo.limits} for outcome in own]),
            "slo_attainment": shares.get("slo_attainment"),
            "slo_attainment_by_metric": shares.get("slo_attainment_by_metric", {}),
        }
        for metric in ("ttft", "tpot", "tbt"):
            values = samples(own, metric)
            for percentile in dict.fromkeys((50.0, *percentiles)):
                value = float(np.percentile(values, percentile)) if values else None
                summaries[name or "(none)"][f"{percentile_name(percentile)}_{metric}_ms"] = value
    return summaries


def _common(limits: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """Return each objective of a class, None where its requests differ, as with a slowdown by prompt length."""
    names = list(dict.fromkeys(name for limit in limits for name in limit))
    values = {name: {limit.get(name) for limit in limits} for name in names}
    return {name: next(iter(each)) if len(each) == 1 else None for name, each in values.items()}


def summary(
    outcomes: Sequence[Outcome],
    duration: float,
    *,
    goals: Goals,
    percentiles: Sequence[float] = (99.0,),
    metrics: Sequence[str] = METRICS,
) -> dict[str, Any]:
    """Return vLLM's keys, `slo_attainment*` and `client_lag`. Durations in s, rates per s, latencies in ms."""
    good = [outcome for outcome in outcomes if outcome.ok]
    prompt, output = sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)
    attained = sum(all(goals.kept(o).values()) for o in good if goals.of(o))
    judged = any(goals.of(outcome) for outcome in outcomes)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(good) / duration,
        "request_goodput": attained / duration if judged else None,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
        "max_output_tokens_per_s": peak_output_rate(good),
        "max_concurrent_requests": peak_concurrency(outcomes),
        **attainment(outcomes, goals),
    }
    if classes := by_class(outcomes, goals, percentiles):
        figures["by_class"] = classes
    for metric in (*metrics, "client_lag"):
        figures |= statistics(samples(outcomes, metric), metric, percentiles)
    return figures


def detail(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return lists with one entry per request, in the order of arrival; seconds."""
    return {
        "input_lens": [o.prompt_tokens for o in outcomes],
        "output_lens": [o.output_tokens for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [o.itls for o in outcomes],
        "latencies": [o.latency for o in outcomes],
        "start_times": [o.start for o in outcomes],
        "client_lags": [o.lag for o in outcomes],
        "ttft_slos_ms": [o.call.slo.ttft_slo_ms for o in outcomes],
        "tpot_slos_ms": [o.call.slo.tpot_slo_ms for o in outcomes],
        "tbt_slos_ms": [o.call.slo.tbt_slo_ms for o in outcomes],
        "tiers": [o.call.slo.service_tier for o in outcomes],
        "classes": [o.call.slo.name for o in outcomes],
        "errors": [o.error for o in outcomes],
    }


def errors(outcomes: Sequence[Outcome], most: int = 5) -> list[str]:
    """Return the most frequent errors with their counts."""
    counted = Counter(outcome.error for outcome in outcomes if outcome.error)
    return [f"{number} × {text}" for text, number in counted.most_common(most)]
