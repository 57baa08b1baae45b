"""One simulated set-up under a question's load. Imports no jax, so that worker processes start quickly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, inf, isfinite
from typing import Any, NamedTuple

from jaxserve.sched import policies
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.request import BEST_EFFORT
from jaxserve.sched.metrics import GOAL
from jaxserve.sched.sim import Arrival, Latency, Mesh, Mix, Options, Workload, simulate
from jaxserve.sched.sim.bounds import TURNING, bounds
from jaxserve.sched.sim.simulate import arrivals_of

SHORTEST = 64  # requests; fewer say nothing about a share


@dataclass(frozen=True, slots=True)
class Candidate:
    """A set-up: `instances` times `tp` devices, of which `prefill` instances prefill (None: colocated).

    chunk: tokens of a step.
    """

    instances: int
    tp: int
    prefill: int | None
    policy: str
    chunk: int

    @property
    def devices(self) -> int:
        return self.instances * self.tp

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.instances, self.tp, self.prefill, colocated=self.prefill is None)

    @property
    def split(self) -> str:
        if self.prefill is None:
            return "colocated" if self.instances > 1 else "one instance"
        return f"{self.prefill}P{self.instances - self.prefill}D"

    def __str__(self) -> str:
        return f"{self.instances}x{self.tp} {self.split}, {self.policy}, steps of {self.chunk}"


class Scale(NamedTuple):
    """Factors on step times of prompts and of everything else, and on the KV pool: for error bars and limits."""

    prefill: float = 1.0
    decode: float = 1.0
    kv: float = 1.0


AS_IT_IS = Scale()


class Trial(NamedTuple):
    """A candidate to simulate with the first `requests` of the load, at `rate` per second."""

    candidate: Candidate
    requests: int
    rate: float
    scale: Scale = AS_IT_IS


class Outcome(NamedTuple):
    """What a trial found. Shares from 0 to 1, times in seconds, rates per second.

    attained: of all requests with objectives, those that no server of this model can take counted as missed.
    goodput: requests that attain their objectives. output: tokens that the load asks for. Both at the trial's rate: the
    time that the last requests take after the last arrival is no part of a rate.
    """

    trial: Trial
    attained: float
    by_class: Mapping[str, float]
    ttft: float  # 90th percentile
    tpot: float  # 90th percentile
    goodput: float
    output: float

    @property
    def candidate(self) -> Candidate:
        return self.trial.candidate


@dataclass(frozen=True)
class Load:
    """The requests of a question.

    source: a distribution, or a trace. slo: fields of the objectives that replace the source's. longest:
    tokens of prompt and output that the model can hold; longer requests are refused by every server.
    """

    source: Workload | Mix | tuple[Arrival, ...]
    rate: float
    requests: int
    seed: int = 0
    slo: Mapping[str, Any] = field(default_factory=dict)
    longest: int = 1 << 62
    goal: float = GOAL

    def arrivals(self, requests: int, rate: float) -> tuple[list[Arrival], float]:
        """Return the first requests at a rate, without those that are too long, and the share that is left.

        Later rounds of a request that is too long are left out with it. `requests` and `rate` count requests of the
        source: with rounds, whole chains.
        """
        source = list(self.source) if isinstance(self.source, tuple) else self.source
        drawn, _ = arrivals_of(source, rate, self.requests, self.seed)
        if requests < self.requests:
            ends = [at for at, request in enumerate(drawn) if request.after is None]
            drawn = drawn[: ends[requests]] if requests < len(ends) else drawn
        places: dict[int, int] = {}
        kept: list[Arrival] = []
        for at, arrival in enumerate(drawn):
            after = None if arrival.after is None else places.get(arrival.after)
            if arrival.prompt_tokens + arrival.output_tokens > self.longest or (
                arrival.after is not None and after is None
            ):
                continue
            places[at] = len(kept)
            slo = arrival.slo if arrival.tier == BEST_EFFORT else replace(arrival.slo, **self.slo)
            kept.append(replace(arrival, after=after, slo=slo))
        return kept, len(kept) / len(drawn)

    @property
    def rounds(self) -> float:
        """Mean requests of a session, whose number and rate then count; 1 if requests count."""
        return self.source.rounds.mean if isinstance(self.source, Workload) and self.source.rounds else 1.0

    @property
    def unit(self) -> str:
        """What `requests` and `rate` count: sessions of a workload in rounds, or requests."""
        return "sessions" if isinstance(self.source, Workload) and self.source.rounds else "requests"

    def longest_ttft(self) -> float:
        """Return the longest finite TTFT of the requests, 0 if none has any."""
        arrivals, _ = self.arrivals(self.requests, self.rate)
        return max((arrival.slo.ttft for arrival in arrivals if arrival.slo.ttft < inf), default=0.0)

    def counts(self, shares: Sequence[float]) -> list[int]:
        """Return the requests of the rungs of successive halving."""
        counts = sorted({min(self.requests, max(SHORTEST, ceil(share * self.requests))) for share in shares})
        return [
            count for count, after in pairwise([*counts, 1 << 62]) if after > 1.25 * count
        ]  # no two of nearly equal length


@dataclass(frozen=True)
class Runner:
    """Simulates trials. A plain value, which is sent to worker processes."""

    load: Load
    latencies: Mapping[int, Latency]  # by T
    rows: int  # limit of running requests per instance

    def __call__(self, trial: Trial, progress: Callable[[int, int], None] | None = None) -> Outcome:
        arrivals, kept = self.load.arrivals(trial.requests, trial.rate)
        candidate = trial.candidate
        report = simulate(
            arrivals,
            candidate.policy,
            candidate.mesh,
            self._latency(trial),
            options=self._options(trial, arrivals),
            progress=progress,
        )
        summary, each = report.summary, trial.rate / min(trial.requests, self.load.requests)
        attained = summary.attained * kept
        return Outcome(
            trial,
            attained,
            {name: share.attained for name, share in summary.by_class.items()},
            summary.ttft.p90,
            summary.tpot.p90,
            attained * len(arrivals) / kept * each,
            sum(arrival.output_tokens for arrival in arrivals) * each,
        )

    def bound(self, trial: Trial) -> float:
        """Return a share that no policy exceeds on these devices, even with full knowledge of the future.

        It is the oracle's (sched/sim/oracle): it counts only work that no policy can avoid, in the step times of the
        simulation, and ignores KV space, transfers and whole steps. So it contains the floors (a request that misses
        its objectives alone on an idle instance) and the capacities (more prefill or decode work in a window than
        the servers have seconds), and a candidate below the goal by this bound is below it in every simulation.
        1 where the bound does not hold: for requests in rounds, whose arrivals depend on the policy.
        """
        arrivals, kept = self.load.arrivals(trial.requests, trial.rate)
        if not any(min(arrival.slo.ttft, arrival.slo.tpot) < inf for arrival in arrivals):
            return 1.0
        candidate = trial.candidate
        options = replace(self._options(trial, arrivals), routing=policies.routing(candidate.policy))
        try:
            (bounded,) = bounds(arrivals, candidate.mesh, self._latency(trial), rates=[None], options=options)
        except InvalidValue:
            return 1.0
        return bounded.bound.share * kept

    def _latency(self, trial: Trial) -> Latency:
        scale, latency = trial.scale, self.latencies[trial.candidate.tp]
        if scale.prefill == scale.decode == 1.0:
            return latency
        return latency.scaled(prefill=scale.prefill, decode=scale.decode)

    def _options(self, trial: Trial, arrivals: Sequence[Arrival]) -> Options:
        """Return options that end a simulation when the last request that keeps its objectives must have ended."""
        horizon = max(
            each.time + each.slo.ttft + max(each.slo.tpot, 0, *dict(each.slo.stages).values()) * each.output_tokens
            for each in arrivals
        )
        known = isfinite(horizon) and all(arrival.after is None for arrival in arrivals)
        return Options(
            tokens=trial.candidate.chunk,
            rows=self.rows,
            kv_scale=trial.scale.kv,
            horizon=horizon + 1.0 if known else None,
        )


def loosest(candidate: Candidate, chunk: int) -> Candidate:
    """Return a candidate on the same devices whose bound holds for `candidate`, and for others like it.

    Roles bind only a policy that does not change them and a router that does not deflect; longer steps are fewer.
    """
    if candidate.prefill is None or policies.routing(candidate.policy).partition(":")[0] in TURNING:
        return replace(candidate, prefill=None, policy="unified", chunk=chunk)
    return replace(candidate, policy="distserve", chunk=chunk)
