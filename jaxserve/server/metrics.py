"""Prometheus metrics: vLLM's names with the prefix `jaxserve:`, plus metrics of SLOs, steps and the compiler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from jaxserve.engine.runtime.classes import ERRORS, SLACK, ClassStats, Spread
from jaxserve.engine.runtime.gc_control import EDGES
from jaxserve.engine.runtime.headroom import REFERENCE
from jaxserve.engine.runtime.info import TierTotals
from jaxserve.generation.generate import Piece, Submission
from jaxserve.outputs import RequestMetrics
from jaxserve.sched.cluster.ttft_predictions import RECENT, Accuracy
from jaxserve.sched.instance.stats import BLOCKING, SIZES

Values = Iterable[tuple[Sequence[str], float]]  # (label values, value)

PREFIX = "jaxserve:"
SHARED = (
    "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client shares values among processes if this is set when it is imported
)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# vLLM's buckets, so that its dashboards work.
# fmt: off
_TTFT = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)
_TPOT = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_HELD = (0, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40)
# fmt: on

_TIMES: tuple[tuple[str, str, Sequence[float]], ...] = (
    ("time_to_first_token_seconds", "Time from arrival to the first token.", _TTFT),
    ("inter_token_latency_seconds", "Time between two tokens of a request.", _TPOT),
    ("request_time_per_output_token_seconds", "Mean time per token after the first, by request.", _TPOT),
    ("e2e_request_latency_seconds", "Time from arrival to the last token.", _REQUEST),
    ("request_queue_time_seconds", "Time from arrival to the request's first step.", _REQUEST),
    ("request_prefill_time_seconds", "Time from the first step to the first token.", _REQUEST),
    ("request_decode_time_seconds", "Time from the first to the last token.", _REQUEST),
    ("request_inference_time_seconds", "Time from the first step to the last token.", _REQUEST),
)


_FORECAST: tuple[tuple[str, str, Callable[[Accuracy], float]], ...] = (
    (
        "predicted_ttft_seconds",
        "Predicted time to first token, when the prompt was routed.",
        lambda one: one.predicted,
    ),
    ("measured_ttft_seconds", "Measured time to first token of requests with a prediction.", lambda one: one.measured),
)


def _steps_1_2_5(limit: int) -> list[int]:
    made, power = list[int](), 1
    while True:
        for factor in (1, 2, 5):
            if factor * power > limit:
                return made
            made.append(factor * power)
        power *= 10


class Metrics:
    """The metrics of one server. Writer: its event loop."""

    def __init__(self, engine: Any, model_name: str) -> None:
        """Register all metrics. `engine.stats()` is read at each scrape."""
        self.registry = CollectorRegistry()
        self._shared = SHARED in os.environ
        if self._shared:
            MultiProcessCollector(self.registry)  # type: ignore[no-untyped-call]
        else:
            ProcessCollector(registry=self.registry)
        self.registry.register(EngineCollector(engine, model_name))
        lengths = _steps_1_2_5(engine.info.max_model_len)
        self._histograms = {
            name: self._make(Histogram, name, text, buckets=buckets).labels(model_name)
            for name, text, buckets in (
                *_TIMES,
                ("request_prompt_tokens", "Prompt tokens, by request.", lengths),
                ("request_generation_tokens", "Generated tokens, by request.", lengths),
            )
        }
        text = "Time for which pacing held computed tokens back. All other metrics use the time of computation."
        self._held = self._make(Histogram, "token_pacing_delay_seconds", text, buckets=_HELD).labels(model_name)
        self._prompt_tokens = self._make(Counter, "prompt_tokens", "Prompt tokens.").labels(model_name)
        text = "Requests that continued on another replica after theirs was lost."
        self._continued = self._make(Counter, "continued_requests", text).labels(model_name)
        self._tokens = self._make(Counter, "generation_tokens", "Generated tokens.").labels(model_name)

    def _make(self, kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
        registry = None if self._shared else self.registry  # the shared files have it
        return kind(PREFIX + name, text, ["model_name", *labels], registry=registry, **more)

    def register(self, collector: Collector) -> None:
        """Add the metrics of another part of the server."""
        self.registry.register(collector)

    def begun(self, job: Submission) -> None:
        """Count a request when its first output arrives."""
        self._prompt_tokens.inc(len(job.prompt) * job.params.n)

    def news(self, job: Submission, piece: Piece) -> None:
        """Count a piece of an output."""
        if piece.tokens:
            self._tokens.inc(len(piece.tokens))
        if piece.metrics is not None and piece.finish_reason in ("stop", "length"):
            self._finished(job, piece.metrics)

    def continued(self) -> None:
        """Count a request that goes on after the loss of its engine."""
        self._continued.inc()

    def held(self, seconds: float) -> None:
        """Record the seconds for which pacing held back a piece."""
        self._held.observe(seconds)

    def _finished(self, job: Submission, times: RequestMetrics) -> None:
        see, tokens = self._see, times.token_times
        see("request_prompt_tokens", len(job.prompt))
        see("request_generation_tokens", len(tokens))
        if times.scheduled is not None:
            see("request_queue_time_seconds", times.scheduled - times.arrival)
        if times.ttft is None or not tokens:
            return
        see("time_to_first_token_seconds", times.ttft)
        see("e2e_request_latency_seconds", tokens[-1] - times.arrival)
        see("request_decode_time_seconds", tokens[-1] - tokens[0])
        if times.scheduled is not None:
            see("request_prefill_time_seconds", tokens[0] - times.scheduled)
            see("request_inference_time_seconds", tokens[-1] - times.scheduled)
        for before, after in pairwise(tokens):
            see("inter_token_latency_seconds", after - before)
        if times.tpot is not None:
            see("request_time_per_output_token_seconds", times.tpot)

    def _see(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def text(self) -> bytes:
        """Return the response body of `/metrics`."""
        return generate_latest(self.registry)


def attainment(stats: Any) -> float:
    """Return the share of ended requests that attained their objectives, aborted ones excluded; NaN for none."""
    ended = sum(count for reason, count in stats.finished.items() if reason != "abort")
    return float(stats.attained) / ended if ended else float("nan")


class EngineCollector(Collector):
    """A collector of the engine's own gauges and counters, read at each scrape."""

    def __init__(self, engine: Any, model_name: str) -> None:
        self._engine = engine
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield from self._levels(stats)
        yield from self._totals(stats)
        yield from self._kv_between(stats)
        yield from self._sums(stats)
        yield from self._tiers(stats)
        yield from self._classes(stats)

    def _family(self, kind: Any, name: str, text: str, values: Values, *labels: str) -> Any:
        family = kind(PREFIX + name, text, labels=["model_name", *labels])
        for key, value in values:
            family.add_metric([self._model, *key], value)
        return family

    def _levels(self, stats: Any) -> Iterator[Metric]:
        levels: tuple[tuple[str, str, Callable[[Any], float]], ...] = (
            ("num_requests_running", "Requests that hold pages.", lambda one: one.running),
            ("num_requests_waiting", "Requests waiting for their first step.", lambda one: one.waiting),
            (
                "kv_cache_usage_perc",
                "Share of KV pages in use, from 0 to 1.",
                lambda one: one.pages_held / (one.pages or 1),
            ),
            ("prefill_backlog_tokens", "Prompt tokens that are still to be computed.", lambda one: one.backlog_tokens),
        )
        for name, text, value in levels:
            values = [((one.name,), float(value(one))) for one in stats.instances]
            yield self._family(GaugeMetricFamily, name, text, values, "engine")
        yield from self._headroom(stats)
        text = "Engines that take requests."
        yield self._family(GaugeMetricFamily, "replicas_ready", text, [((), float(stats.replicas))])
        text = "Share of ended requests that attained their objectives."
        yield self._family(GaugeMetricFamily, "slo_attainment", text, [((), attainment(stats))])
        yield from self._promise()
        info = GaugeMetricFamily(
            PREFIX + "cache_config_info",
            "Page size and number of pages of the KV cache, as labels.",
            labels=["model_name", "engine", "block_size", "num_gpu_blocks"],
        )
        for one in self._engine.info.instances:
            info.add_metric([self._model, one.name, str(one.page_size), str(one.pages)], 1.0)
        yield info
        text = "The attention backend, as a label."
        yield self._family(
            GaugeMetricFamily, "attention_backend_info", text, [((self._engine.info.attention,), 1.0)], "backend"
        )

    def _headroom(self, stats: Any) -> Iterator[Metric]:
        values = [((one.name, name), tokens) for one in stats.instances for name, tokens in one.headroom.budget.items()]
        text = "Prompt tokens that the instance can take within the TTFT of the class (PAB), negative if overcommitted."
        yield self._family(GaugeMetricFamily, "prefill_budget_tokens", text, values, "engine", "slo_class")
        for name, text, field in (
            ("instance_slack_seconds", "Time by which no next token of the instance would be late.", "slack"),
            ("prefill_queue_seconds", "Predicted time of the prompts that are still to be computed.", "queue"),
            (
                "instance_predicted_ttft_seconds",
                f"Predicted time to first token of a prompt of {REFERENCE} tokens that arrives now.",
                "ttft",
            ),
        ):
            seconds = [((one.name,), float(getattr(one.headroom, field))) for one in stats.instances]
            yield self._family(GaugeMetricFamily, name, text, seconds, "engine")

    def _promise(self) -> Iterator[Metric]:
        promise = self._engine.info.promise
        goals = {"ttft": promise.slo.ttft, "tpot": promise.slo.tpot}
        text = "Objectives of requests that set none."
        seconds = [((name,), goal) for name, goal in goals.items()]
        yield self._family(GaugeMetricFamily, "slo_seconds", text, seconds, "objective")
        text = "1 if this machine can meet the objective at a useful batch size, by step times measured at startup."
        kept = [((name,), float(name not in promise.broken)) for name in goals]
        yield self._family(GaugeMetricFamily, "slo_attainable", text, kept, "objective")

    def _totals(self, stats: Any) -> Iterator[Metric]:
        counters = stats.counters
        for name, text, value in (
            ("num_preemptions", "Preemptions, each of which dropped the KV of a request.", counters.preemptions),
            (
                "preempted_steps",
                "Prefill steps stopped at a segment boundary for more urgent work.",
                counters.suspended,
            ),
            ("resumed_steps", "Stopped prefill steps that were resumed.", counters.resumed),
            ("demotions", "Requests demoted to best effort, on arrival or later.", counters.demotions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", counters.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", counters.prefix_hits),
            (
                "computed_prompt_tokens",
                "Prompt tokens computed, including again after preemptions.",
                counters.prompt_tokens,
            ),
            ("surplus_tokens", "Tokens computed for requests that had already ended.", counters.surplus_tokens),
            ("steps", "Steps of all instances.", counters.steps),
            ("pool_rebuilds", "KV pools rebuilt after a failed step.", counters.rebuilds),
            (
                "hung_steps",
                "Steps that exceeded the time limit; their instance gets no requests until they end.",
                stats.hung_steps,
            ),
            ("journal_errors", "1 after a write error stopped the journal (--journal).", stats.journal_errors),
            ("compilations", "Programs compiled, including during warm-up.", stats.compilations),
            (
                "compilations_after_warmup",
                "Programs compiled while serving; expected to be 0.",
                stats.compilations_after_warmup,
            ),
            ("compilation_cache_loads", "Programs loaded from the compilation cache on disk.", stats.cache_loads),
            (
                "compilation_cache_write_failures",
                "Compiled programs that could not be written to the cache.",
                stats.unkept_programs,
            ),
            ("event_loop_stalls", "Stalls of the engine's event loop of more than 5 ms.", stats.stalls),
            ("deflections", "Requests prefilled on a decode instance.", stats.deflections),
            ("spec_decode_num_drafts", "Drafts verified.", counters.drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens proposed.", counters.drafted),
            ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", counters.accepted),
        ):
            yield self._family(CounterMetricFamily, name, text, [((), float(value))])
        text = "Draft tokens accepted, by position in the draft."
        by_position = [((str(at),), float(count)) for at, count in enumerate(counters.accepted_at)]
        yield self._family(
            CounterMetricFamily, "spec_decode_num_accepted_tokens_per_pos", text, by_position, "position"
        )
        text = "Requests that ended, by reason."
        reasons = {**dict.fromkeys(("stop", "length", "abort", "error"), 0), **stats.finished}
        by_reason = [((reason,), float(count)) for reason, count in reasons.items()]
        yield self._family(CounterMetricFamily, "request_success", text, by_reason, "finished_reason")
        by_phase = [((phase,), float(count)) for phase, count in stats.violations.items()]
        collections = {**dict.fromkeys(("idle", "slack", "memory"), 0), **stats.collections}
        by_why = [((why,), float(count)) for why, count in collections.items()]
        text = "Garbage collections by the engine, by reason."
        yield self._family(CounterMetricFamily, "garbage_collections", text, by_why, "reason")
        text = "Requests that missed an objective, counted once: by ttft, by tpot (mean) or by tbt (largest gap)."
        yield self._family(CounterMetricFamily, "slo_violations", text, by_phase, "phase")

    def _tiers(self, stats: Any) -> Iterator[Metric]:
        for name, text, value in (
            ("prefix_fetch_pages", "KV pages fetched into a prefix cache from outside.", stats.prefix_fetch_pages),
            ("prefix_fetch_failures", "Fetches that brought no page.", stats.prefix_fetch_failures),
            ("kv_copies_skipped", "KV pages that were not copied to the first tier.", stats.kv_copies_skipped),
        ):
            yield self._family(CounterMetricFamily, name, text, [((), float(value))])
        tiers: dict[str, TierTotals] = stats.kv_tiers
        for kind, name, text in (
            (GaugeMetricFamily, "pages", "KV pages in a tier."),
            (GaugeMetricFamily, "bytes", "Bytes of the KV pages in a tier."),
            (CounterMetricFamily, "hits", "KV pages fetched from a tier."),
            (CounterMetricFamily, "stores", "KV pages written to a tier."),
            (CounterMetricFamily, "evictions", "KV pages that a tier evicted."),
            (CounterMetricFamily, "skipped", "KV pages that a tier had no room for, or could not write."),
            (CounterMetricFamily, "missing", "KV pages that were damaged or gone when a tier read them."),
        ):
            values = [((tier,), float(getattr(one, name))) for tier, one in tiers.items()]
            yield self._family(kind, f"kv_tier_{name}", text, values, "tier")
        text = "Time of fetches from a tier."
        family = SummaryMetricFamily(PREFIX + "kv_tier_fetch_seconds", text, labels=["model_name", "tier"])
        for tier, one in tiers.items():
            family.add_metric([self._model, tier], one.fetches, one.seconds)
        yield family

    def _kv_between(self, stats: Any) -> Iterator[Metric]:
        for name, text, value in (
            ("kv_fetched_pages", "KV pages fetched from other engine processes.", stats.kv_fetched_pages),
            ("kv_fetched_bytes", "Bytes of KV pages fetched from other engine processes.", stats.kv_fetched_bytes),
            (
                "kv_fetch_fallbacks",
                "Fetches from other engine processes without pages, whose tokens were computed instead.",
                stats.kv_fetch_fallbacks,
            ),
            ("kv_given_pages", "KV pages given to other engine processes.", stats.kv_given_pages),
        ):
            yield self._family(CounterMetricFamily, name, text, [((), float(value))])

    def _sums(self, stats: Any) -> Iterator[Metric]:
        counters = stats.counters
        for name, text, count, total in (
            ("predicted_step_seconds", "Predicted step times.", counters.steps, counters.predicted_seconds),
            ("measured_step_seconds", "Measured step times.", counters.steps, counters.measured_seconds),
            (
                "garbage_collection_seconds",
                "Time in garbage collections by the engine.",
                sum(stats.collections.values()),
                stats.collection_seconds,
            ),
            ("kv_transfer_seconds", "Time of KV transfers between instances.", stats.transfers, stats.transfer_seconds),
            (
                "prefix_fetch_seconds",
                "Time for which requests waited for KV pages from outside.",
                stats.prefix_fetches,
                stats.prefix_fetch_seconds,
            ),
            (
                "kv_fetch_seconds",
                "Time of fetches of KV pages from other engine processes, by pages.",
                stats.kv_fetched_pages,
                stats.kv_fetch_seconds,
            ),
        ):
            family: Any = SummaryMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([self._model], count, total)
            yield family
        for name, text, value in _FORECAST:
            family = SummaryMetricFamily(PREFIX + name, text, labels=["model_name", "path"])
            for path, one in stats.ttft_predictions.items():
                family.add_metric([self._model, path], one.count, value(one))
            yield family
        text = "Mean absolute error of predicted TTFT, relative to the measured TTFT."
        errors = [((path,), one.mape) for path, one in stats.ttft_predictions.items()]
        yield self._family(GaugeMetricFamily, "ttft_prediction_mape", text, errors, "path")
        text = f"Median relative error of the latest {RECENT} TTFT predictions."
        medians = [((path,), one.median) for path, one in stats.ttft_predictions.items() if one.median is not None]
        yield self._family(GaugeMetricFamily, "ttft_prediction_median_error", text, medians, "path")
        text = "Durations of event loop stalls of more than 5 ms."
        sizes = stats.stall_sizes or (0,) * (len(EDGES) + 1)
        yield self._histograms("event_loop_stall_seconds", text, EDGES, [((), Spread(sizes, stats.stall_seconds))])
        text = "Time from requesting that a prefill step stops until it has stopped or completed."
        blocked = Spread(tuple(counters.blocked), counters.blocking)
        yield self._histograms("preemption_blocking_seconds", text, BLOCKING, [((), blocked)])
        tokens = Spread(tuple(counters.sizes), counters.tokens)
        yield self._histograms("iteration_tokens_total", "Tokens per step.", SIZES, [((), tokens)])

    def _classes(self, stats: Any) -> Iterator[Metric]:
        """Metrics by SLO class. The configuration alone determines the number of series."""
        classes: dict[str, ClassStats] = stats.classes
        ended = {key: one.ended for key, one in classes.items()}
        attained = {key: one.attained for key, one in classes.items()}
        for name, text, counted in (
            ("slo_requests", "Ended requests by objective; all: every objective that the request has.", ended),
            ("slo_attained", "Ended requests that attained the objective.", attained),
        ):
            values = [((key, phase), float(n)) for key, phases in counted.items() for phase, n in phases.items()]
            yield self._family(CounterMetricFamily, name, text, values, "slo_class", "phase")
        slack = [((key, phase), seen) for key, one in classes.items() for phase, seen in one.slack.items()]
        text = "Slack left at the first token (ttft), at the last (tpot) and after the longest gap (tbt)."
        yield self._histograms("request_slack_seconds", text, SLACK, slack, "slo_class", "phase")
        errors = [((key,), one.errors) for key, one in classes.items()]
        text = "|predicted - measured| / measured TTFT, as predicted when the prompt was routed."
        yield self._histograms("ttft_prediction_error", text, ERRORS, errors, "slo_class")

    def _histograms(
        self, name: str, text: str, edges: Sequence[float], seen: Iterable[tuple[Sequence[str], Spread]], *labels: str
    ) -> Metric:
        """Return one histogram family, without label values that have no observations."""
        family: Any = HistogramMetricFamily(PREFIX + name, text, labels=["model_name", *labels])
        for key, one in seen:
            if one.count or not labels:
                up_to = zip((*map(str, map(float, edges)), "+Inf"), accumulate(one.sizes), strict=True)
                family.add_metric([self._model, *key], list(up_to), one.total)
                if edges[0] < 0:  # prometheus_client omits the count of histograms with negative buckets
                    values = dict(zip(("model_name", *labels), (self._model, *key), strict=True))
                    family.add_sample(f"{PREFIX}{name}_count", values, one.count)
        made: Metric = family
        return made


class StatsLine:
    """The statistics line that a server logs every ten seconds unless it is idle."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._last: tuple[float, int, int] | None = None
        self._drafts = (0, 0)
        self._idle = True

    def text(self, now: float) -> str | None:
        """Return the line for the time since the last call, or None if idle. `now` in seconds."""
        stats = self._engine.stats()
        counters = stats.counters
        mine = (now, counters.prompt_tokens, counters.generated_tokens)
        last, self._last = self._last or mine, mine
        idle = mine[1:] == last[1:] and not stats.running and not stats.waiting
        silent, self._idle = idle and self._idle, idle
        if silent:
            return None
        span = max(now - last[0], 1e-9)
        hits = counters.prefix_hits / counters.prefix_queries if counters.prefix_queries else 0.0
        return (
            f"prompt {(mine[1] - last[1]) / span:.1f} tokens/s, generation {(mine[2] - last[2]) / span:.1f} tokens/s, "
            f"running {stats.running}, waiting {stats.waiting}, KV cache {stats.kv_usage:.1%}, prefix hits {hits:.1%}, "
            f"SLO attained {attainment(stats):.1%}{self._drafted(counters)}"
        )

    def _drafted(self, counters: Any) -> str:
        """Return the part about draft tokens since the last call."""
        now, before = (counters.drafted, counters.accepted), self._drafts
        self._drafts = now
        drafted = now[0] - before[0]
        return f", drafted {drafted}, accepted {(now[1] - before[1]) / drafted:.1%}" if drafted else ""
