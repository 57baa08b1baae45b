"""What an engine says of itself: frozen facts at the start, frozen snapshots while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.engine.runtime.classes import PHASES, ClassStats
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
    """What requests are promised that bring no objective, and whether this machine can keep it."""

    slo: SLO = NO_SLO
    automatic: frozenset[str] = frozenset()  # of `ttft` and `tpot`, those that come from the profile
    broken: dict[str, str] = field(default_factory=dict)  # why, by objective, where one cannot be kept


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts that do not change while an engine runs."""

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
    attention: str = "xla"  # the attention backend that was resolved
    promise: Promise = Promise()


@dataclass(frozen=True, slots=True)
class InstanceStats:
    """One instance at one moment."""

    name: str
    role: str
    running: int
    waiting: int
    pages: int
    pages_held: int
    backlog_tokens: int  # prompt tokens still to compute


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals and levels of an engine at one moment."""

    instances: tuple[InstanceStats, ...]
    counters: Counters  # summed over instances
    transferring: int  # requests whose KV is on its way
    transfers: int
    transfer_seconds: float
    finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    classes: dict[str, ClassStats] = field(default_factory=dict)  # what was promised and kept, by class
    compilations: int = 0
    compilations_after_warmup: int = 0
    cache_loads: int = 0
    stalls: int = 0  # times the engine's loop heard of nothing for longer than 5 ms
    stall_seconds: float = 0.0
    stall_sizes: tuple[int, ...] = ()  # by the upper edges in engine/runtime/gc_control.py, and above
    collections: dict[str, int] = field(default_factory=dict)  # of garbage, by why: idle, slack, memory
    collection_seconds: float = 0.0
    deflections: int = 0  # prompts given to instances that decode
    ttft_predictions: dict[str, Accuracy] = field(default_factory=dict)  # of first tokens, by path
    unkept_programs: int = 0  # compiled, and not kept because the cache folder cannot be written
    journal_errors: int = 0  # 1 once the journal could not be written and has stopped
    hung_steps: int = 0  # steps that were taken to hang

    @property
    def attained(self) -> int:
        """Requests that ended within everything they were promised."""
        return sum(one.attained["all"] for one in self.classes.values())

    @property
    def violations(self) -> dict[str, int]:
        """Requests that missed an objective, by phase; one that missed several counts for each."""
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
        """Share of all pages that are held."""
        pages = sum(one.pages for one in self.instances)
        return sum(one.pages_held for one in self.instances) / pages if pages else 0.0
