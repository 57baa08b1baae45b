"""The scenarios and systems of SLOs-Serve's tables, and the capacity of a system in a scenario."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # import this checkout, installed or not

from jaxserve.config import load_yaml, preset
from jaxserve.sched.api.perf import Load
from jaxserve.sched.metrics import Summary
from jaxserve.sched.perf import Perf
from jaxserve.sched.sim import Latency, Mesh, Options, goodput_search
from jaxserve.sched.sim.scenarios import NAMED
from jaxserve.sched.sim.workload import for_server

OPT = load_yaml(preset("latency", "opt-7b-a100-40g"), Latency)
R1 = load_yaml(preset("latency", "deepseek-r1-qwen-1.5b-a100-40g"), Latency)
DRAFT, ACCEPTANCE = 4, 0.7  # assumed; the paper states neither
TOLERANCE = 0.1
GOAL = 0.9  # share of requests that must attain their SLOs
PUBLISHED: Perf = "roofline:published"  # the paper's step-time model


@dataclass(frozen=True)
class Scenario:
    """A workload and its server. requests: drawn per GPU. start: first rate of the search, per GPU."""

    name: str
    requests: int
    start: float
    draft: int = DRAFT
    kv: float = 1.0  # factor on the preset's KV pool
    latency: Latency = OPT
    own_slowdown: bool = (
        False  # TTFT objectives are multiples of this server's prefill times, not of the paper's model's
    )

    @property
    def workload(self) -> Any:
        named = NAMED[f"slos-serve-{self.name.partition(',')[0]}"]
        if not self.own_slowdown:
            return named
        devices = self.latency.solve()
        return for_server(named, lambda tokens: devices.step_time(Load().add_chunk(tokens, 0)))


CHATBOT = Scenario("chatbot", 120, 2.6)
CODER = Scenario("coder", 250, 3.0)
SUMMARIZER = Scenario("summarizer", 120, 2.0)
MIXED = Scenario("mixed", 150, 3.2)
TOOLLLM = Scenario("toolllm", 200, 0.4, draft=0)
CHATBOT_3X = Scenario("chatbot, 3x KV", 120, 4.0, kv=3.0)
SCENARIOS = (CHATBOT, CODER, SUMMARIZER, MIXED, TOOLLLM, CHATBOT_3X)
REASONING = Scenario("reasoning", 40, 0.05, draft=0, own_slowdown=True)
REASONING_R1 = Scenario("reasoning", 400, 4.0, draft=0, latency=R1)


@dataclass(frozen=True)
class System:
    """A row of a table: a policy and its deployment.

    spec: whether it drafts if the scenario has a draft model. perf: its scheduler's step-time model. options: further
    options of the simulation.
    """

    label: str
    policy: str
    mesh: Mesh = field(default_factory=lambda: Mesh(1))
    spec: bool = False
    perf: Perf = "general"
    options: tuple[tuple[str, Any], ...] = ()

    def under(self, scenario: Scenario) -> Options:
        draft = scenario.draft if self.spec else 0
        return Options(perf=self.perf, draft=draft, acceptance=ACCEPTANCE, kv_scale=scenario.kv, **dict(self.options))


VLLM, SARATHI = System("vLLM", "vllm"), System("Sarathi", "sarathi")
SPLITS = tuple(
    System(f"DistServe {prefill}:{decode}", "distserve", Mesh(prefill + decode, prefill=prefill))
    for prefill, decode in ((1, 1), (2, 1), (1, 2))
)
OURS = System("`slos_serve`", "slos_serve", spec=True)
OURS_PUBLISHED = System("`slos_serve`, published roofline", "slos_serve", spec=True, perf=PUBLISHED)


def kept(summary: Summary) -> float:
    """Return the share of requests that attain both SLOs, with TPOT over every ten tokens."""
    return summary.window_attained


@cache
def capacity(system: System, scenario: Scenario, requests: int = 0, goal: float = GOAL) -> float:
    """Return the requests per second and GPU at which a share `goal` attains its SLOs.

    requests: per simulation; by default the scenario's, and twice as many on several GPUs.
    """
    gpus = system.mesh.instances
    found = goodput_search(
        scenario.workload,
        [system.policy],
        system.mesh,
        scenario.latency,
        num_requests=requests or scenario.requests * min(gpus, 2),
        options=system.under(scenario),
        goal=goal,
        value=kept,
        tolerance=TOLERANCE,
        start=scenario.start * gpus,
    )
    rate = found[system.policy].rate / gpus
    print(f"  {system.label}, {scenario.name}, {goal:.0%}: {rate:.3f}", flush=True)
    return rate


def ratio(ours: float, others: Sequence[float]) -> str:
    best = max(others)
    return f"{ours / best:.2f}" if best else "–"


def two(value: float) -> str:
    return f"{value:.2f}"
