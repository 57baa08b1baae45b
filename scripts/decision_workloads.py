"""The ten small workloads of scripts/decisions, each drawn from a seed and with its own characteristics."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Job(NamedTuple):
    """A request of a workload. `follows`: the request that it continues, `arrival` seconds after that one has ended."""

    arrival: float
    prompt: int
    output: int
    ttft: float = 0.5
    tpot: float = 0.02
    tbt: float | None = None
    priority: int = 0
    best_effort: bool = False
    thinking: int = 0
    prefix: int = 0  # number of leading tokens shared by all requests of the same `family`
    family: int = 0
    follows: int | None = None
    cancel_at: float | None = None


@dataclass(frozen=True)
class Setting:
    """The cluster that serves a workload."""

    jobs: Sequence[Job]
    roles: str  # one letter per instance: P prefill, D decode, M mixed
    pages: int = 600
    page_size: int = 16
    rows: int = 24
    tokens: int = 1024
    prompts: int = 1 << 30
    preemptible: bool = False
    lead: float = 0.0
    draft: int = 0
    admission: str = "none"
    behind: bool = False
    failing: int = 0  # every `failing`-th step fails; 0: none
    role_changes: Sequence[tuple[float, Mapping[int, str]]] = field(default=())


def drawn(seed: int, count: int, gap: float, prompt: tuple[int, int], output: tuple[int, int]) -> list[Job]:
    """Draw requests with exponential gaps, and uniform lengths and objectives."""
    draw, now, jobs = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(1 / gap)
        slo = draw.choice([0.15, 0.3, 0.8]), draw.choice([0.008, 0.012, 0.03])
        jobs.append(Job(now, draw.randint(*prompt), draw.randint(*output), *slo))
    return jobs


def changed(jobs: Sequence[Job], change: Callable[[int, Job], dict[str, Any]]) -> list[Job]:
    return [job._replace(**change(index, job)) for index, job in enumerate(jobs)]


def colocated() -> Setting:
    return Setting(drawn(1, 48, 0.012, (30, 900), (2, 30)), "MM", lead=1e-3)


def split() -> Setting:
    return Setting(drawn(2, 48, 0.01, (30, 1200), (4, 40)), "PPDD", lead=1e-3)


def overload() -> Setting:
    return Setting(drawn(3, 40, 0.004, (100, 1200), (2, 16)), "PDD", admission="pab", behind=True)


def bursts() -> Setting:
    jobs = changed(drawn(4, 48, 0.01, (50, 700), (4, 30)), lambda index, job: {"arrival": index // 12 * 0.2})
    return Setting(jobs, "MMM", prompts=4, admission="dp:refuse")


def long_prompts() -> Setting:
    jobs = changed(
        drawn(5, 36, 0.02, (20, 300), (4, 30)),
        lambda index, job: {"prompt": 1500 + 60 * index, "ttft": 2.0} if index % 4 == 0 else {},
    )
    return Setting(jobs, "PMD", pages=900, tokens=2048, preemptible=True, behind=True)


def tiers() -> Setting:
    jobs = changed(
        drawn(6, 44, 0.008, (30, 700), (4, 30)),
        lambda index, job: {
            "best_effort": index % 5 < 2,
            "priority": index % 3,
            "tbt": 0.05 if index % 4 == 1 else None,
        },
    )
    return Setting(jobs, "MM", tokens=512, preemptible=True, admission="pab")


def tight_memory() -> Setting:
    return Setting(drawn(7, 26, 0.006, (30, 250), (20, 70)), "PDM", pages=26, rows=10, tokens=256, lead=1e-3)


def speculation() -> Setting:
    return Setting(drawn(8, 40, 0.008, (30, 800), (8, 40)), "PMD", draft=3)


def prefixes() -> Setting:
    jobs = changed(
        drawn(9, 48, 0.008, (20, 500), (4, 24)),
        lambda index, job: {
            "prefix": 64 * (index % 3 + 1),
            "family": index % 3,
            "follows": index - 5 if index % 2 and index > 5 else None,
            "arrival": 0.05 if index % 2 and index > 5 else job.arrival,
        },
    )
    return Setting(jobs, "PPD", pages=400, behind=True)


def disturbances() -> Setting:
    jobs = changed(
        drawn(10, 44, 0.008, (30, 800), (6, 30)),
        lambda index, job: {
            "cancel_at": job.arrival + 0.01 * index if index % 6 == 3 else None,
            "thinking": 3 if index % 5 == 0 else 0,
        },
    )
    changes = ((0.15, {1: "D"}), (0.35, {1: "P", 2: "M"}))
    return Setting(jobs, "PPDD", lead=1e-3, failing=37, role_changes=changes)


MADE = (colocated, split, overload, bursts, long_prompts, tiers, tight_memory, speculation, prefixes, disturbances)
WORKLOADS: dict[str, Callable[[], Setting]] = {made.__name__: made for made in MADE}
