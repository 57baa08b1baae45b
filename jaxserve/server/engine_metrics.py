"""Metrics of the engine's own counts, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from jaxserve.engine.runtime.classes import ERRORS, SLACK, ClassStats, Spread
from jaxserve.engine.runtime.gc_control import EDGES
from jaxserve.engine.runtime.headroom import REFERENCE
from jaxserve.engine.runtime.info import TierTotals
from jaxserve.sched.cluster.ttft_predictions import RECENT, Accuracy
from jaxserve.sched.instance.stats import BLOCKING, SIZES
from jaxserve.server.stats_line import attainment
from jaxserve.settings.operations import PREFIX

READY = "ready", "1 if an engine takes requests; 0 while the server starts, and while its engines are away."
Values = Iterable[tuple[Sequence[str], float]]  # (label values, value)

_FORECAST: tuple[tuple[str, str, Callable[[Accuracy], float]], ...] = (
    (
        "predicted_ttft_seconds",
        "Predicted time to first token, when the prompt was routed.",
        lambda one: one.predicted,
    ),
    ("measured_ttft_seconds", "Measured time to first token of requests with a prediction.", lambda one: one.measured),
)


class EngineCollector(Collector):
    """A collector of the engine's own gauges and counters, read at each scrape."""

    def __init__(self, engine: Any, model_name: str, prefix: str = PREFIX) -> None:
        self._engine = engine
        self._model = model_name
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield from self._levels(stats)
        yield from self._totals(stats)
        yield from self._kv_between(stats)
        yield from self._sums(stats)
        yield from self._tiers(stats)
        yield from self._classes(stats)

    def _family(self, kind: Any, name: str, text: str, values: Values, *labels: str) -> Any:
        family = kind(self._prefix + name, text, labels=["model_name", *labels])
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
            ("session_pinned_pages", "Cached KV pages that sessions keep between turns.", lambda one: one.pages_pinned),
            ("prefill_backlog_tokens", "Prompt tokens that are still to be computed.", lambda one: one.backlog_tokens),
        )
        for name, text, value in levels:
            values = [((one.name,), float(value(one))) for one in stats.instances]
            yield self._family(GaugeMetricFamily, name, text, values, "engine")
        yield from self._headroom(stats)
        for name, text, count in (
            ("replicas_ready", "Engines that take requests.", stats.replicas),
            ("replicas_wanted", "Engines that should take requests.", stats.replicas_wanted),
            ("replicas_draining", "Engines that finish their requests and end.", stats.replicas_draining),
            ("programs", "Programs of all instances.", stats.programs),
            ("programs_ready", "Programs that are ready; the others are made while the engine serves.",
             stats.programs_ready),
        ):  # fmt: skip
            yield self._family(GaugeMetricFamily, name, text, [((), float(count))])
        yield self._family(GaugeMetricFamily, *READY, [((), float(self._engine.ailment is None))])
        text = "Share of ended requests that attained their objectives."
        yield self._family(GaugeMetricFamily, "slo_attainment", text, [((), attainment(stats))])
        yield from self._promise()
        info = GaugeMetricFamily(
            self._prefix + "cache_config_info",
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
            ("session_pins_expired", "Sessions whose pages were kept for --session-timeout.", counters.pins_expired),
            (
                "session_pins_displaced",
                "Sessions whose pages gave way to those of more recent ones (--session-cache-share).",
                counters.pins_displaced,
            ),
            (
                "session_pinned_pages_evicted",
                "Pages of sessions that running requests needed.",
                counters.pins_evicted,
            ),
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
                "Programs that a step waited for; expected to be 0.",
                stats.compilations_after_warmup,
            ),
            ("compilation_cache_loads", "Programs loaded from the compilation cache on disk.", stats.cache_loads),
            ("program_traces", "Programs traced; 0 while every program is kept from earlier starts.", stats.traces),
            ("programs_loaded", "Executables of earlier starts that were loaded.", stats.programs_loaded),
            ("programs_later", "Programs that became ready while serving.", stats.programs_later),
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
            (
                "prefix_fetch_unused_pages",
                "KV pages fetched in vain: computed or evicted meanwhile, or without room.",
                stats.prefix_fetch_unused,
            ),
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
        family = SummaryMetricFamily(self._prefix + "kv_tier_fetch_seconds", text, labels=["model_name", "tier"])
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
            family: Any = SummaryMetricFamily(self._prefix + name, text, labels=["model_name"])
            family.add_metric([self._model], count, total)
            yield family
        for name, text, value in _FORECAST:
            family = SummaryMetricFamily(self._prefix + name, text, labels=["model_name", "path"])
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
        family: Any = HistogramMetricFamily(self._prefix + name, text, labels=["model_name", *labels])
        for key, one in seen:
            if one.count or not labels:
                up_to = zip((*map(str, map(float, edges)), "+Inf"), accumulate(one.sizes), strict=True)
                family.add_metric([self._model, *key], list(up_to), one.total)
                if edges[0] < 0:  # prometheus_client omits the count of histograms with negative buckets
                    values = dict(zip(("model_name", *labels), (self._model, *key), strict=True))
                    family.add_sample(f"{self._prefix}{name}_count", values, one.count)
        made: Metric = family
        return made
