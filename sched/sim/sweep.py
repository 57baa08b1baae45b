"""Many simulations: policies, rates and seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .latency import Latency
from .options import DEFAULT, Mesh, Options
from .simulate import Progress, Report, simulate
from .workload import Arrival, Workload


class Case(NamedTuple):
    """One cell of a sweep."""

    policy: str
    rate: float | None
    seed: int


@dataclass(frozen=True, slots=True)
class Cell:
    """Runs one case; a plain value, so that another process can."""

    workload: Workload | Sequence[Arrival]
    mesh: Mesh
    latency: Latency
    num_requests: int | None
    options: Options

    def __call__(self, case: Case) -> Report:
        return simulate(
            self.workload,
            case.policy,
            self.mesh,
            self.latency,
            case.seed,
            qps=case.rate,
            num_requests=self.num_requests,
            options=self.options,
        )


Run = Callable[[Callable[[Case], Report], Sequence[Case]], Iterable[Report]]


def sweep(
    workload: Workload | Sequence[Arrival],
    policies: Sequence[str],
    mesh: Mesh | str,
    latency: Latency,
    *,
    rates: Sequence[float | None],
    seeds: Sequence[int] = (0,),
    num_requests: int | None = None,
    options: Options = DEFAULT,
    progress: Progress | None = None,
    run: Run = map,
) -> list[Report]:
    """Every policy at every rate with every seed, in this order. `run` maps a function over cases and keeps their
    order; one that spreads them over processes makes it faster."""
    mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    cases = [Case(policy, rate, seed) for policy in policies for rate in rates for seed in seeds]
    reports: list[Report] = []
    for report in run(Cell(workload, mesh, latency, num_requests, options), cases):
        reports.append(report)
        if progress is not None:
            progress(len(reports), len(cases))
    return reports
