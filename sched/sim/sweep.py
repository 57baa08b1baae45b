"""Many simulations: policies, rates and seeds; and the search for the highest rate that a policy sustains."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import NamedTuple

from ..api.errors import InvalidValue
from ..metrics import GOAL, Summary
from .latency import Latency
from .options import DEFAULT, Mesh, Options
from .simulate import Drawn, PolicyLike, Progress, Report, policy_name, simulate
from .workload import Arrival

FARTHEST = 2.0**16  # times the rate that a search starts from, and it gives up


class Case(NamedTuple):
    """One cell of a sweep."""

    policy: PolicyLike
    rate: float | None
    seed: int


@dataclass(frozen=True, slots=True)
class Cell:
    """Runs one case; a plain value, so that another process can."""

    workload: Drawn | Sequence[Arrival]
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
    workload: Drawn | Sequence[Arrival],
    policies: Sequence[PolicyLike],
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


class Goodput(NamedTuple):
    """The highest rate found (requests per second) at which a policy reaches the goal, 0 where none does, and all
    that was simulated on the way, by rate and seed."""

    rate: float
    reports: tuple[Report, ...]


def attained(summary: Summary) -> float:
    """What a goodput usually asks a share of: both objectives, by count."""
    return summary.attained


def goodput_search(
    workload: Drawn | Sequence[Arrival],
    policies: Sequence[PolicyLike],
    mesh: Mesh | str,
    latency: Latency,
    *,
    seeds: Sequence[int] = (0,),
    num_requests: int | None = None,
    options: Options = DEFAULT,
    goal: float = GOAL,
    value: Callable[[Summary], float] = attained,
    tolerance: float = 0.02,
    start: float = 1.0,
    progress: Progress | None = None,
    run: Run = map,
) -> dict[str, Goodput]:
    """Per policy, by bisection, a rate at which `value`, as a mean over seeds, reaches the goal, and `tolerance` (a
    share) above which it does not. Where attainment is not monotone in the rate, the crossing that is met first.

    The searches go in step, so that `run` has a case per policy and seed at a time. `start`: rate to try first.
    `progress` hears of simulations done, and of those known to be wanted. Raises InvalidValue.
    """
    if not 0 < goal <= 1:
        raise InvalidValue(f"{goal=} must be above 0 and at most 1", "goal")
    if not 0 < tolerance < 1:
        raise InvalidValue(f"{tolerance=} must be between 0 and 1", "tolerance")
    if not 0 < start < inf:
        raise InvalidValue(f"{start=} must be a positive number of requests per second", "start")
    mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    cell = Cell(workload, mesh, latency, num_requests, options)
    searches = [_search(start, tolerance) for _ in policies]
    rates: dict[int, float] = {index: next(search) for index, search in enumerate(searches)}
    found = [0.0] * len(policies)
    reports: list[list[Report]] = [[] for _ in policies]
    while rates:
        cases = [Case(policies[index], rate, seed) for index, rate in rates.items() for seed in seeds]
        done = sum(map(len, reports))
        came: list[Report] = []
        for report in run(cell, cases):
            came.append(report)
            if progress is not None:
                progress(done + len(came), done + len(cases))
        for index, rate in list(rates.items()):
            mine, came = came[: len(seeds)], came[len(seeds) :]
            reports[index] += mine
            reached = fmean(value(one.summary) for one in mine) >= goal
            found[index] = max(found[index], rate) if reached else found[index]
            try:
                rates[index] = searches[index].send(reached)
            except StopIteration:
                del rates[index]
    return {
        policy_name(policy): Goodput(rate, tuple(sorted(tried, key=_order)))
        for policy, rate, tried in zip(policies, found, reports, strict=True)
    }


def _order(report: Report) -> tuple[float, int]:
    return report.rate, report.seed


def _search(start: float, tolerance: float) -> Generator[float, bool, None]:
    """Rates to try, each answered by whether it was sustained: doubled or halved up to a bracket, then bisected."""
    low = high = start
    if (yield start):
        high = 2 * start
        while (yield high):
            low, high = high, 2 * high
            if high > start * FARTHEST:
                return
    else:
        low = start / 2
        while not (yield low):
            low, high = low / 2, low
            if low < start / FARTHEST:
                return
    while high > low * (1 + tolerance):
        middle = (low * high) ** 0.5
        if (yield middle):
            low = middle
        else:
            high = middle
