"""Descriptions of an engine: frozen facts from startup, and frozen snapshots while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.engine.runtime.classes import PHASES, ClassStats
from jaxserve.engine.runtime.headroom import Headroom
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


@dataclass(frozen=True, slots=True)
class InstanceStats:
    """A snapshot of one instance."""

    name: str
    role: str
    running: int
    waiting: int
    pages: int
    pages_held: int
    backlog_tokens: int  # prompt tokens still to compute
    headroom: Headroom = field(default_factory=Headroom)
    pages_pinned: int = 0  # cached pages that sessions keep between turns


@dataclass(frozen=True, slots=True)
class TierTotals:
    """A snapshot of a KV tier."""

    pages: int = 0
    bytes: int = 0
    hits: int = 0  # pages fetched
    stores: int = 0  # pages written
    evictions: int = 0
    skipped: int = 0  # pages that found no room, or could not be written
    missing: int = 0  # pages that were damaged or gone when they were read
    fetches: int = 0
    seconds: float = 0.0  # of fetches


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of an engine's totals and levels."""

    instances: tuple[InstanceStats, ...]
    counters: Counters  # summed over instances
    transferring: int  # requests with a KV transfer in progress
    transfers: int
    transfer_seconds: float
    finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    classes: dict[str, ClassStats] = field(default_factory=dict)  # attainment and slack, by class
    compilations: int = 0
    compilations_after_warmup: int = 0
    cache_loads: int = 0
    stalls: int = 0  # times the engine's loop did not react to events for longer than 5 ms
    stall_seconds: float = 0.0
    stall_sizes: tuple[int, ...] = ()  # counts by the upper edges in engine/runtime/gc_control.py, and above
    collections: dict[str, int] = field(default_factory=dict)  # garbage collections, by reason: idle, slack, memory
    collection_seconds: float = 0.0
    deflections: int = 0  # prompts routed to decode instances
    ttft_predictions: dict[str, Accuracy] = field(default_factory=dict)  # errors of TTFT predictions, by path
    unkept_programs: int = 0  # compiled, but not stored because the cache folder is not writable
    journal_errors: int = 0  # 1 after the journal failed to be written and stopped
    hung_steps: int = 0  # steps that the watchdog gave up
    traces: int = 0  # programs that jax traced
    programs: int = 0  # of all instances
    programs_ready: int = 0
    programs_loaded: int = 0  # kept executables of earlier starts
    programs_later: int = 0  # that became ready while serving
    replicas: int = 1  # engines that take requests
    replicas_wanted: int = 1  # engines that should
    replicas_draining: int = 0  # engines that finish their requests and end
    kv_tiers: dict[str, TierTotals] = field(default_factory=dict)  # by name
    prefix_fetches: int = 0  # requests that were held for pages from outside their instance
    prefix_fetch_seconds: float = 0.0  # for which they were held
    prefix_fetch_pages: int = 0  # that are in a prefix cache since
    prefix_fetch_unused: int = 0  # pages that arrived in vain
    prefix_fetch_failures: int = 0
    kv_copies_skipped: int = 0  # pages not copied to the first tier: too many waited, or they were gone
    kv_fetched_pages: int = 0  # from other engines
    kv_fetched_bytes: int = 0
    kv_fetch_seconds: float = 0.0
    kv_fetch_fallbacks: int = 0  # fetches without pages: this engine computed the tokens
    kv_given_pages: int = 0  # to other engines

    @property
    def attained(self) -> int:
        """The number of requests that met every objective."""
        return sum(one.attained["all"] for one in self.classes.values())

    @property
    def violations(self) -> dict[str, int]:
        """Requests that missed an objective, by phase; a request that missed several counts in each."""
        classes = self.classes.values()
        return {phase: sum(one.ended[phase] - one.attained[phase] for one in classes) for phase in PHASES[:3]}

    @property
    def running(self) -> int:
        return sum(one.running for one in self.instances)

    @property
    def waiting(self) -> int:
        return sum(one.waiting for one in self.instances)

    @property
    def kv_usage(self) -> float:
        """The share of pages that are held."""
        pages = sum(one.pages for one in self.instances)
        return sum(one.pages_held for one in self.instances) / pages if pages else 0.0
