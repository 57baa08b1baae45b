"""The setup of a simulation: instances, and options that stay fixed while policies, rates and seeds vary."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from ..api.errors import InvalidValue
from ..api.policy import Role
from ..api.preemption import LEAD
from ..perf import Perf
from .executor import Device
from .latency import Latency
from .tiers import NO_TIERS, Tiers


@dataclass(frozen=True, slots=True)
class Mesh:
    """R instances of T devices each.

    `prefill` instances prefill (default: half) and the others decode. A single instance, or all of them if
    `colocated`, are mixed.
    """

    instances: int
    tensor_parallel: int = 1
    prefill: int | None = None
    colocated: bool = False

    def __post_init__(self) -> None:
        _ = self.roles

    @classmethod
    def parse(cls, text: str, prefill: int | None = None, *, colocated: bool = False) -> Mesh:
        """Create a mesh from `RxT`, as in 2x4. Raises InvalidValue for other text."""
        match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)", text.strip())
        if match is None:
            raise InvalidValue(f"mesh={text!r} must be RxT, instances by devices per instance, as in 2x4", "mesh")
        return cls(int(match[1]), int(match[2]), prefill, colocated)

    @property
    def roles(self) -> tuple[Role, ...]:
        if self.colocated or self.instances == 1:
            if self.prefill is not None:
                raise InvalidValue(f"prefill={self.prefill} cannot be set if all instances are colocated", "prefill")
            return (Role.MIXED,) * self.instances
        prefill = self.instances // 2 if self.prefill is None else self.prefill
        if not 1 <= prefill < self.instances:
            raise InvalidValue(f"prefill={prefill} must be 1 to {self.instances - 1} on {self.instances} instances")
        return (Role.PREFILL,) * prefill + (Role.DECODE,) * (self.instances - prefill)

    def __str__(self) -> str:
        return f"{self.instances}x{self.tensor_parallel}"


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the number of replicas follows the load. In seconds.

    scaler: by name, see sched/scaling. begin: replicas that serve at the start. startup: from the
    decision to start a replica until it serves (ASSUMED: warm caches; a cold start of a large model
    takes minutes). period: between decisions. hold: for which the number must have been too high
    before it falls (Kubernetes' HPA: 300 s).
    """

    scaler: str = "budget"
    begin: int = 1
    least: int = 1
    startup: float = 60.0
    period: float = 5.0
    hold: float = 120.0


@dataclass(frozen=True, slots=True)
class Options:
    """Options that stay fixed while policies, rates and seeds vary. In seconds, tokens and shares.

    perf: step-time model of the schedulers, see perf.registry.make. `general` is the true model, corrected
        online; `exact` is never corrected; the others are profiled from the true model.
    prediction_error: constant relative error of all predictions (0.2: a fifth too long).
    noise: overrides the latency preset.
    routing, admission: by name. The router `auto` is the one that goes with the policy.
    tokens, rows, prompts, suspended, draft, cascade: see policy.Limits. prompts None: no limit.
    fill: fit chunks to the sizes that the preset's devices pad steps to (Limits.stairs).
    boundary: where prefill steps can be preempted; with `chunk` they cannot. lead: see Device.
    segments: equal parts of a step, overrides `boundary`. stop_within: see policy.Limits.
    behind: see Device. The engine copies KV in the stream of the steps, other systems beside it.
    queue_timeout: time without a first token after which a waiting request is ended; 0: no limit.
    acceptance: probability that a drafted token is accepted.
    routing_delay: time from arrival until the instance has the request.
    stale: age of what the router knows of the instances.
    fronts: routers that take requests in turn and do not see what the others sent lately; each counts what it sent
        itself. 0: one router, which by outdated state alone sends many requests to the same instance.
    prefix_caching: None enables it if the workload has shared prefixes.
    pages, page_size: override the preset. kv_scale: factor on the number of pages.
    skip: requests at each end that are not counted.
    horizon: time after which the simulation stops. Unfinished requests count as violated.
    turns: role changes, each a time and the roles of all instances from then on.
    tiers: where KV goes that leaves the pools.
    scaling: the number of replicas, which are the instances of the mesh. None: all serve all the time.
    timer: a real clock, read before and after each decision. The times are only reported.
    """

    perf: Perf = "general"
    prediction_error: float = 0.0
    noise: float | None = None
    routing: str = "auto"
    admission: str = "none"
    queue_timeout: float = 0.0
    tokens: int = 8192
    rows: int = 256
    prompts: int | None = None
    first_token: str = "prefill"
    boundary: str = "layer"
    lead: float = LEAD
    behind: bool = False
    segments: int | None = None
    stop_within: float | None = None
    suspended: int = 4
    draft: int = 0
    cascade: bool = False
    acceptance: float = 0.7
    routing_delay: float = 0.0
    stale: float = 0.0
    fronts: int = 0
    prefix_caching: bool | None = None
    pages: int | None = None
    page_size: int | None = None
    kv_scale: float = 1.0
    skip: int = 0
    horizon: float | None = None
    turns: tuple[tuple[float, tuple[Role, ...]], ...] = ()
    scaling: Scaling | None = None
    timer: Callable[[], float] | None = None
    fill: bool = True
    tiers: Tiers = NO_TIERS

    def __post_init__(self) -> None:
        for name, ok, allowed in (
            ("prediction_error", -1 < self.prediction_error < inf, "more than -1"),
            ("tokens", self.tokens >= 1, "at least 1"),
            ("rows", self.rows >= 1, "at least 1"),
            ("prompts", self.prompts is None or self.prompts >= 1, "at least 1"),
            ("suspended", self.suspended >= 0, "0 or more"),
            ("lead", 0 <= self.lead < inf, "0 s or more"),
            ("segments", self.segments is None or self.segments >= 1, "at least 1"),
            ("stop_within", self.stop_within is None or self.stop_within > LEAD, f"more than {LEAD} s"),
            ("draft", self.draft >= 0, "0 or more"),
            ("acceptance", 0 <= self.acceptance <= 1, "between 0 and 1"),
            ("routing_delay", 0 <= self.routing_delay < inf, "0 s or more"),
            ("stale", 0 <= self.stale < inf, "0 s or more"),
            ("fronts", self.fronts >= 0, "0 or more"),
            ("kv_scale", 0 < self.kv_scale < inf, "more than 0"),
            ("queue_timeout", 0 <= self.queue_timeout < inf, "0 s or more"),
            ("skip", self.skip >= 0, "0 or more"),
            ("horizon", self.horizon is None or self.horizon > 0, "more than 0 s"),
        ):
            if not ok:
                raise InvalidValue(f"{name}={getattr(self, name)!r} must be {allowed}", name)

    def device(self, latency: Latency) -> Device:
        """Create a simulated instance from a latency preset."""
        device = latency.device(self.boundary, lead=self.lead, pages=self.pages, page_size=self.page_size)
        return replace(
            device,
            segments=self.segments or device.segments,
            behind=self.behind,
            pages=max(1, round(device.pages * self.kv_scale)),
            noise=device.noise if self.noise is None else self.noise,
            acceptance=self.acceptance if self.draft else 0.0,
        )


DEFAULT = Options()
