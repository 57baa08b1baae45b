"""Descriptions of an engine: frozen facts from startup, and frozen snapshots while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import nan
from typing import ClassVar

from jaxserve.engine.runtime.activity import Activity
from jaxserve.engine.runtime.classes import NO_PROMPTS, PHASES, ClassStats, PromptStats
from jaxserve.engine.runtime.gc_control import EDGES
from jaxserve.engine.runtime.headroom import Headroom
from jaxserve.sched.api.metric import COUNTER, GAUGE, HISTOGRAM, Metric, counter, gauge, row, summary, within
from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.sched.api.thinking import ThinkingMarkers
from jaxserve.sched.cluster.ttft_predictions import Accuracy
from jaxserve.sched.instance.stats import Counters


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """One instance of the mesh."""

    name: str
    role: str  # prefill, decode or mixed
    devices: tuple[str, ...]
    pages: int
    page_size: int  # tokens


@dataclass(frozen=True, slots=True)
class Promise:
    """The default SLO of requests that set none, and whether this machine can meet it."""

    slo: SLO = NO_SLO
    automatic: frozenset[str] = frozenset()  # those of `ttft` and `tpot` that come from the profile
    broken: dict[str, str] = field(default_factory=dict)  # reasons, by objective, why it cannot be met


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about an engine that do not change while it runs."""

    model: str
    max_model_len: int
    vocab_size: int
    dtype: str
    instances: tuple[InstanceInfo, ...]
    policy: str
    routing: str
    eos: frozenset[int]
    thinking: ThinkingMarkers
    startup_seconds: float
    attention: str = "xla"  # the resolved attention backend
    promise: Promise = Promise()
    hidden_size: int = 0  # numbers in a pooled vector
    logits_processors: tuple[str, ...] = ()  # that requests may ask for
    generates: bool = True  # whether the model has an output head; without it, it gives vectors only
    score_head: bytes = b""  # [E] little-endian float32, of a model that scores pairs of texts


@dataclass(frozen=True, slots=True)
class InstanceStats:
    """A snapshot of one instance."""

    name: str
    role: str
    running: int = gauge("num_requests_running", "Requests that hold pages.")
    waiting: int = gauge("num_requests_waiting", "Requests waiting for their first step.")
    pages: int = 0
    pages_held: int = 0
    backlog_tokens: int = gauge("prefill_backlog_tokens", "Prompt tokens that are still to be computed.")
    headroom: Headroom = within(Headroom, default_factory=Headroom)
    pages_pinned: int = gauge("session_pinned_pages", "Cached KV pages that sessions keep between turns.")
    activity: Activity = field(default_factory=Activity)  # of the last `measure`

    DERIVED: ClassVar = (
        Metric(GAUGE, "kv_cache_usage_perc", "Share of KV pages in use, from 0 to 1.", attribute="usage"),
    )

    @property
    def usage(self) -> float:
        """The share of pages that are held."""
        return self.pages_held / (self.pages or 1)


@dataclass(frozen=True, slots=True)
class TierTotals:
    """A snapshot of a KV tier."""

    pages: int = gauge("kv_tier_pages", "KV pages in a tier.")
    bytes: int = gauge("kv_tier_bytes", "Bytes of the KV pages in a tier.")
    hits: int = counter("kv_tier_hits", "KV pages fetched from a tier.")
    stores: int = counter("kv_tier_stores", "KV pages written to a tier.")
    evictions: int = counter("kv_tier_evictions", "KV pages that a tier evicted.")
    skipped: int = counter("kv_tier_skipped", "KV pages that a tier had no room for, or could not write.")
    missing: int = counter("kv_tier_missing", "KV pages that were damaged or gone when a tier read them.")
    fetches: int = 0
    seconds: float = summary("kv_tier_fetch_seconds", "Time of fetches from a tier.", of="fetches")


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of an engine's totals and levels. A field that is a metric says so: name, kind and meaning.

    `merged.py` adds several; `server/engine_metrics.py` shows them.
    """

    instances: tuple[InstanceStats, ...] = within(InstanceStats, "engine")
    counters: Counters = within(Counters)  # summed over instances
    transferring: int = 0  # requests with a KV transfer in progress
    transfers: int = 0
    transfer_seconds: float = summary("kv_transfer_seconds", "Time of KV transfers between instances.", of="transfers")
    finished: dict[str, int] = row(
        COUNTER,
        "request_success",
        "Requests that ended, by reason.",
        {"label": "finished_reason", "keys": ("stop", "length", "abort", "error")},
        default_factory=dict,
    )
    classes: dict[str, ClassStats] = within(ClassStats, "slo_class", default_factory=dict)  # attainment and slack
    by_prompt: dict[str, PromptStats] = within(PromptStats, "prompt", default_factory=lambda: dict(NO_PROMPTS))
    compilations: int = counter("compilations", "Programs compiled, including during warm-up.")
    compilations_after_warmup: int = counter(
        "compilations_after_warmup", "Programs that a step waited for; expected to be 0."
    )
    cache_loads: int = counter("compilation_cache_loads", "Programs loaded from the compilation cache on disk.")
    stalls: int = counter("event_loop_stalls", "Stalls of the engine's event loop of more than 5 ms.")
    stall_seconds: float = 0.0
    stall_sizes: tuple[int, ...] = row(
        HISTOGRAM,
        "event_loop_stall_seconds",
        "Durations of event loop stalls of more than 5 ms.",
        {"edges": EDGES, "of": "stall_seconds"},
        default=(0,) * (len(EDGES) + 1),
    )
    collections: dict[str, int] = row(
        COUNTER,
        "garbage_collections",
        "Garbage collections by the engine, by reason.",
        {"label": "reason", "keys": ("idle", "slack", "memory")},
        default_factory=dict,
    )
    collection_seconds: float = summary(
        "garbage_collection_seconds", "Time in garbage collections by the engine.", of="collections"
    )
    deflections: int = counter("deflections", "Requests prefilled on a decode instance.")
    reroutes: int = counter("reroutes", "Waiting prompts that the router moved to another instance.")
    role_changes: int = counter("role_changes", "Instances that changed between prefill and decode.")
    ttft_predictions: dict[str, Accuracy] = within(Accuracy, "path", default_factory=dict)
    unkept_programs: int = counter(
        "compilation_cache_write_failures", "Compiled programs that could not be written to the cache."
    )
    journal_errors: int = counter("journal_errors", "1 after a write error stopped the journal (--journal).")
    hung_steps: int = counter(
        "hung_steps", "Steps that exceeded the time limit; their instance gets no requests until they end."
    )
    traces: int = counter("program_traces", "Programs traced; 0 while every program is kept from earlier starts.")
    programs: int = gauge("programs", "Programs of all instances.")
    programs_ready: int = gauge(
        "programs_ready", "Programs that are ready; the others are made while the engine serves."
    )
    programs_loaded: int = counter("programs_loaded", "Executables of earlier starts that were loaded.")
    programs_later: int = counter("programs_later", "Programs that became ready while serving.")
    replicas: int = gauge("replicas_ready", "Engines that take requests.", 1)
    replicas_wanted: int = gauge("replicas_wanted", "Engines that should take requests.", 1)
    replicas_draining: int = gauge("replicas_draining", "Engines that finish their requests and end.")
    kv_tiers: dict[str, TierTotals] = within(TierTotals, "tier", default_factory=dict)
    prefix_fetches: int = 0  # requests that were held for pages from outside their instance
    prefix_fetch_seconds: float = summary(
        "prefix_fetch_seconds", "Time for which requests waited for KV pages from outside.", of="prefix_fetches"
    )
    prefix_fetch_pages: int = counter("prefix_fetch_pages", "KV pages fetched into a prefix cache from outside.")
    prefix_fetch_unused: int = counter(
        "prefix_fetch_unused_pages", "KV pages fetched in vain: computed or evicted meanwhile, or without room."
    )
    prefix_fetch_failures: int = counter("prefix_fetch_failures", "Fetches that brought no page.")
    kv_copies_skipped: int = counter("kv_copies_skipped", "KV pages that were not copied to the first tier.")
    kv_fetched_pages: int = counter("kv_fetched_pages", "KV pages fetched from other engine processes.")
    kv_fetched_bytes: int = counter("kv_fetched_bytes", "Bytes of KV pages fetched from other engine processes.")
    kv_fetch_seconds: float = summary(
        "kv_fetch_seconds", "Time of fetches of KV pages from other engine processes, by pages.", of="kv_fetched_pages"
    )
    kv_fetch_fallbacks: int = counter(
        "kv_fetch_fallbacks", "Fetches from other engine processes without pages, whose tokens were computed instead."
    )
    kv_given_pages: int = counter("kv_given_pages", "KV pages given to other engine processes.")

    DERIVED: ClassVar = (
        Metric(
            GAUGE,
            "slo_attainment",
            "Share of the ended requests with objectives that attained all of them, without best effort.",
            attribute="attainment",
        ),
        Metric(
            COUNTER,
            "slo_violations",
            "Requests that missed an objective, counted once: by ttft, by tpot (mean) or by tbt (largest gap).",
            "phase",
            attribute="violations",
        ),
    )

    @property
    def promised(self) -> int:
        """The ended requests with objectives, without those that were cancelled or asked for best effort."""
        return sum(counts.ended for counts in self.by_prompt.values())

    @property
    def attained(self) -> int:
        """Those of `promised` that met every objective."""
        return sum(counts.attained for counts in self.by_prompt.values())

    @property
    def attainment(self) -> float:
        """The share of `attained` in `promised`; NaN for none."""
        return self.attained / self.promised if self.promised else nan

    @property
    def violations(self) -> dict[str, int]:
        """Requests that missed an objective, by phase; a request that missed several counts in each."""
        classes = self.classes.values()
        return {phase: sum(tally.ended[phase] - tally.attained[phase] for tally in classes) for phase in PHASES[:3]}

    @property
    def running(self) -> int:
        return sum(instance.running for instance in self.instances)

    @property
    def waiting(self) -> int:
        return sum(instance.waiting for instance in self.instances)

    @property
    def kv_usage(self) -> float:
        """The share of pages that are held."""
        pages = sum(instance.pages for instance in self.instances)
        return sum(instance.pages_held for instance in self.instances) / pages if pages else 0.0
