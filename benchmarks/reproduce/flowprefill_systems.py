"""The systems of FlowPrefill's tables, on a prefill instance that serves the task mix of QwenTrace."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # import this checkout, installed or not

from jaxserve.config import load_yaml, preset
from jaxserve.sched.api.perf import Load
from jaxserve.sched.metrics import GOAL, Summary
from jaxserve.sched.sim import Arrival, Latency, Options, Report, goodput_search, simulate
from jaxserve.sched.sim.scenarios import flowprefill

WHOLE = 65536  # tokens, above the longest prompt of the mix
REQUESTS, SEEDS, TOLERANCE = 800, (0, 1), 0.04


@dataclass(frozen=True)
class Prompts:
    """The task mix with a model's TTFT objectives (Table 2) and one output token per request."""

    scale: float = 1.0
    model: str = "llama3-8b"
    name: str = "flowprefill, prompts alone"

    def draw(self, count: int, rate: float, seed: int) -> list[Arrival]:
        drawn = flowprefill(self.model, self.scale).draw(count, rate, seed)
        return [replace(arrival, output_tokens=1) for arrival in drawn]


@dataclass(frozen=True)
class Deployment:
    """A model on its devices.

    model: name of its TTFT objectives in Table 2. preset: of its step times. devices: per instance.
    """

    label: str
    model: str
    preset: str
    devices: int = 1

    @cached_property
    def latency(self) -> Latency:
        return load_yaml(preset("latency", self.preset), Latency)

    @property
    def full(self) -> float:
        """Requests per second at which computing every prompt alone saturates the instance."""
        truth = self.latency.solve()
        drawn = Prompts(1.0, self.model).draw(2000, 1.0, 0)
        return 1 / fmean(truth.step_time(Load().add_chunk(one.prompt_tokens, 0)) for one in drawn)


LLAMA_8B = Deployment("Llama3-8B", "llama3-8b", "llama3-8b-a800")
QWEN_14B = Deployment("Qwen2.5-14B", "qwen2.5-14b", "qwen2.5-14b-a800-tp2", 2)
LLAMA_70B = Deployment("Llama3-70B", "llama3-70b", "llama3-70b-a800-tp4", 4)
QWEN_MOE = Deployment("Qwen3-30B-A3B", "llama3-8b", "qwen3-30b-a3b-a800-tp2", 2)  # its TTFTs are not published
DEPLOYMENTS = (LLAMA_8B, QWEN_14B, LLAMA_70B, QWEN_MOE)


@dataclass(frozen=True)
class System:
    """A row of a table: a policy and its deployment."""

    label: str
    policy: str
    options: dict[str, Any] = field(default_factory=dict)
    where: Deployment = LLAMA_8B
    requests: int = REQUESTS
    seeds: tuple[int, ...] = SEEDS

    def settings(self) -> Options:
        given = {"tokens": WHOLE, "boundary": "op", "suspended": 64, "perf": "poly", **self.options}
        return Options(**given)

    @property
    def mesh(self) -> str:
        return f"2x{self.where.devices}"

    def run(self, rate: float, scale: float = 1.0, **more: Any) -> list[Report]:
        return [
            simulate(
                Prompts(scale, self.where.model), self.policy, self.mesh, self.where.latency, seed,
                qps=rate, num_requests=self.requests, options=self.settings(), **more,
            )
            for seed in self.seeds
        ]  # fmt: skip

    def attained(self, rate: float, scale: float = 1.0) -> float:
        return fmean(ttft(report.summary) for report in self.run(rate, scale))

    def goodput(self) -> float:
        found = goodput_search(
            Prompts(1.0, self.where.model), [self.policy], self.mesh, self.where.latency, seeds=self.seeds,
            num_requests=self.requests, options=self.settings(), value=ttft, tolerance=TOLERANCE, start=2.0,
        )  # fmt: skip
        return found[self.policy].rate

    def tightest(self, rate: float) -> float:
        """Return the smallest SLO scale at which the goal is attained."""
        low, high = 0.125, 0.25
        while self.attained(rate, high) < GOAL:
            low, high = high, 2 * high
        while high > low * (1 + TOLERANCE):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if self.attained(rate, middle) >= GOAL else (middle, high)
        return high


def ttft(summary: Summary) -> float:
    return summary.ttft_attained


def percent(system: System, *rates: float) -> list[float]:
    return [100 * system.attained(rate) for rate in rates]


CHUNK = {"boundary": "chunk"}
FLOW = System("FlowPrefill", "flowprefill")
LITERAL = System("FlowPrefill, literal", "flowprefill:literal")
DISTSERVE = System("DistServe", "distserve", {"prompts": 1, **CHUNK})
CP2K = System("DistServe-CP2K (EDF)", "edf", {"tokens": 2048, **CHUNK})
CP8K = System("DistServe-CP8K (EDF)", "edf", {"tokens": 8192, **CHUNK})
PUBLISHED = (FLOW, LITERAL, DISTSERVE, CP2K, CP8K)
SYSTEMS = (
    *PUBLISHED,
    System("EDF, 2K, one prompt a chunk", "edf:no-pack", {"tokens": 2048, **CHUNK}),
    System("S-EDF, 2K, one prompt a chunk", "sedf:no-pack", {"tokens": 2048, **CHUNK}),
)


def sized(args: argparse.Namespace, system: System) -> System:
    """Return the system with the requests and seeds of the command line, if given."""
    seeds = tuple(range(args.seeds)) if args.seeds else system.seeds
    return replace(system, requests=args.requests or system.requests, seeds=seeds)
