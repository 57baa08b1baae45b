"""SLOs-Serve's tables in the simulator (arXiv 2504.08784): capacity, what each part brings, one to four replicas.

    python benchmarks/reproduce/slos_serve.py              # all tables, some minutes on two cores
    python benchmarks/reproduce/slos_serve.py capacity     # Figures 1 and 9: the scenarios, four systems
    python benchmarks/reproduce/slos_serve.py reasoning    # Figure 9: the one of them whose requests take minutes
    python benchmarks/reproduce/slos_serve.py ablation     # Figure 14: parts taken away one after another
    python benchmarks/reproduce/slos_serve.py replicas     # Figure 13: one to four replicas
    python benchmarks/reproduce/slos_serve.py burst        # Figure 11: a burst served by promises and best effort

Capacity is the highest rate per GPU at which 90 % of requests keep their TTFT and the mean time per token over every
ten tokens. Models, devices and lengths: docs/reproduction.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # measure this checkout, installed or not

import choose

from jaxserve.config import load_yaml, preset
from jaxserve.report.table import print_table
from jaxserve.sched.metrics import Summary
from jaxserve.sched.perf.model import Load
from jaxserve.sched.sim import Latency, Mesh, Options, goodput_search, simulate
from jaxserve.sched.sim.scenarios import NAMED
from jaxserve.sched.sim.workload import for_server

OPT = load_yaml(preset("latency", "opt-7b-a100-40g"), Latency)
DRAFT, ACCEPTANCE = 4, 0.7  # assumed: the paper says neither
TOLERANCE = 0.1


@dataclass(frozen=True)
class Scenario:
    """A workload, the requests to draw of it, a rate to begin with, and what serves it."""

    name: str
    requests: int
    start: float
    draft: int = DRAFT
    kv: float = 1.0  # times the KV pool of the preset
    measured: bool = False  # TTFTs are multiples of OPT-7B's own, not of those of the model that the paper gives it

    @property
    def workload(self) -> Any:
        named, devices = NAMED[f"slos-serve-{self.name.partition(',')[0]}"], OPT.solve()
        if not self.measured:
            return named
        return for_server(named, lambda tokens: devices.step_time(Load().add_chunk(tokens, 0)))


SCENARIOS = (
    Scenario("chatbot", 120, 3.2),
    Scenario("coder", 250, 2.0),
    Scenario("summarizer", 120, 2.0),
    Scenario("mixed", 150, 2.5),
    Scenario("toolllm", 200, 2.0, draft=0),
    Scenario("chatbot, 3x KV", 120, 4.0, kv=3.0),
)
REASONING = Scenario("reasoning", 40, 0.05, measured=True)


@dataclass(frozen=True)
class System:
    """A row: a policy and how it is deployed. spec: it may draft where the scenario has a draft model."""

    label: str
    policy: str
    mesh: Mesh = field(default_factory=lambda: Mesh(1))
    spec: bool = False
    options: dict[str, Any] = field(default_factory=dict)


OURS = System("SLOs-Serve", "slos_serve", spec=True)
BASELINES = (
    System("vLLM", "vllm"),
    System("Sarathi", "sarathi"),
    System("DistServe 1:1", "distserve", Mesh(2)),
)
PARTS = (
    System("speculation as published", "slos_serve:caution=0", spec=True),
    OURS,
    System("- speculation", "slos_serve:no-spec"),
    System("- dynamic batch size", "slos_serve:no-spec+no-dynamic"),
    System("- best effort (refused)", "slos_serve:no-spec+no-dynamic", options={"admission": "dp:refuse"}),
    System("- promises (all by deadline)", "slos_serve:no-admit+no-spec+no-dynamic"),
)


def kept(summary: Summary) -> float:
    return summary.window_attained


def capacity_of(case: tuple[System, Scenario, int]) -> float:
    """Requests per second and GPU, by so many requests."""
    system, scenario, requests = case
    gpus = system.mesh.instances
    draft = scenario.draft if system.spec else 0
    options = Options(draft=draft, acceptance=ACCEPTANCE, kv_scale=scenario.kv, **system.options)
    found = goodput_search(
        scenario.workload,
        [system.policy],
        system.mesh,
        OPT,
        num_requests=requests,
        options=options,
        value=kept,
        tolerance=TOLERANCE,
        start=scenario.start * gpus,
    )
    return found[system.policy].rate / gpus


def parallel(make: Callable[[Any], Any], of: Sequence[Any]) -> list[Any]:
    """In a process per core."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(make, of))


def rows(systems: Sequence[System], scenarios: Sequence[Scenario], requests: int = 0) -> list[list[float]]:
    """[systems][scenarios] capacities, by as many requests a GPU as the scenario says, or by `requests` in all."""
    flat = parallel(
        capacity_of,
        [(one, two, requests or two.requests * one.mesh.instances) for one in systems for two in scenarios],
    )
    width = len(scenarios)
    return [flat[at : at + width] for at in range(0, len(flat), width)]


def capacity() -> None:
    """Figures 1 and 9."""
    systems = (*BASELINES, OURS)
    found = rows(systems, SCENARIOS)
    shown = [[system.label, *map(_two, row)] for system, row in zip(systems, found, strict=True)]
    for label, against in (("x best colocated", found[:2]), ("x DistServe", found[2:3])):
        best = [max(column) for column in zip(*against, strict=True)]
        shown.append([label, *(f"{o / b:.2f}" if b else "-" for o, b in zip(found[-1], best, strict=True))])
    print_table("Capacity, requests/s per GPU (Figures 1 and 9)", ["system", *(s.name for s in SCENARIOS)], shown)


def reasoning() -> None:
    """Figure 9, the scenario whose requests take minutes each."""
    patient = System("SLOs-Serve, idle steps of half a TTFT", "slos_serve:block=0.5", spec=True)
    systems = (*BASELINES, OURS, patient)
    found = rows(systems, (REASONING,))
    shown = [[system.label, f"{row[0]:.4f}"] for system, row in zip(systems, found, strict=True)]
    print_table("Capacity, requests/s per GPU (Figure 9)", ["system", REASONING.name], shown)


def ablation() -> None:
    """Figure 14."""
    scenarios = named("coder", "summarizer", "mixed")
    found = rows(PARTS, scenarios)
    shown = [[system.label, *map(_two, row)] for system, row in zip(PARTS, found, strict=True)]
    print_table("Parts taken away, requests/s (Figure 14)", ["system", *(s.name for s in scenarios)], shown)


def replicas() -> None:
    """Figure 13."""
    scenarios = named("chatbot", "coder")
    systems = [
        System(
            f"{count}, {place}", "slos_serve:no-spec", Mesh(count, colocated=count > 1), options={"placement": place}
        )
        for count, place in ((1, "round_robin"), (2, "next_replica"), (4, "next_replica"), (4, "round_robin"))
    ]
    found = rows(systems, scenarios, 400)
    shown = [
        [system.label, *(f"{one * system.mesh.instances / base:.2f}" for one, base in zip(row, found[0], strict=True))]
        for system, row in zip(systems, found, strict=True)
    ]
    titles = ["replicas, routing", *(s.name for s in scenarios)]
    print_table("Capacity in all, as multiples of one replica's (Figure 13)", titles, shown)


def named(*names: str) -> list[Scenario]:
    return [one for one in SCENARIOS if one.name in names]


def burst() -> None:
    """Figure 11: coder above its capacity."""
    scenario = SCENARIOS[1]
    shown = parallel(_burst, [(system, scenario, rate) for rate in (4.5, 9.0) for system in (*BASELINES[:2], OURS)])
    titles = ["req/s", "system", "kept, %", "p50 TTFT s", "p99 TTFT s", "p99 TTFT of the kept s", "last ended s"]
    print_table("Coder in bursts (Figure 11)", titles, shown)


def _burst(case: tuple[System, Scenario, float]) -> list[object]:
    system, scenario, rate = case
    options = Options(draft=scenario.draft if system.spec else 0, acceptance=ACCEPTANCE)
    report = simulate(
        scenario.workload, system.policy, system.mesh, OPT, 0,
        qps=rate, num_requests=scenario.requests, options=options,
    )  # fmt: skip
    inside = sorted(one.ttft for one in report.measured if one.ttft_attained and one.window_attained)
    last = inside[int(0.99 * (len(inside) - 1))] if inside else float("nan")
    summary = report.summary
    cells = (
        f"{100 * summary.window_attained:.1f}",
        *map(_two, (summary.ttft.p50, summary.ttft.p99, last, report.ended)),
    )
    return [f"{rate:g}", system.label, *cells]


def _two(value: float) -> str:
    return f"{value:.2f}"


if __name__ == "__main__":
    raise SystemExit(choose.run(__doc__, (capacity, reasoning, ablation, replicas, burst)))
