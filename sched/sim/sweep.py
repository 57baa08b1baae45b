"""Sweeps over policies, rates and seeds, and the search for the highest rate that a policy sustains."""

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

FARTHEST = 2.0**16  # factor from the initial rate at which a search gives up


class Case(NamedTuple):
    """One cell of a sweep."""

    policy: PolicyLike
    rate: float | None
    seed: int


@dataclass(frozen=True, slots=True)
class Cell:
    """A callable that runs one case. A plain value, so that it can be sent to another process."""

    workload: Drawn | Sequence[Arrival]
    mesh: Mesh
    latency: Latency
    num_requests: int | None
    options: Options

    def __call__(self, case: Case, progress: Progress | None = None) -> Report:
        return simulate(
            self.workload,
            case.policy,
            self.mesh,
            self.latency,
            case.seed,
            qps=case.rate,
            num_requests=self.num_requests,
            options=self.options,
            progress=progress,
        )


Run = Callable[[Cell, Sequence[Case]], Iterable[Report]]


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
    """Run every policy at every rate with every seed, and return the reports in this order.

    run: maps a function over cases and keeps their order, for example over several processes.
    """
    mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    cases = [Case(policy, rate, seed) for policy in policies for rate in rates for seed in seeds]
    reports: list[Report] = []
    for report in run(Cell(workload, mesh, latency, num_requests, options), cases):
        reports.append(report)
        if progress is not None:
            progress(len(reports), len(cases))
    return reports


class Goodput(NamedTuple):
    """The highest rate found, in requests per second, at which a policy reaches the goal, or 0.

    reports: all simulations of the search, by rate and seed.
    """

    rate: float
    reports: tuple[Report, ...]


def attained(summary: Summary) -> float:
    """Return the usual criterion of goodput: the share of requests that attain both objectives."""
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
    """Find for each policy, by bisection, the rate up to which the mean of `value` over seeds reaches the goal.

    The rate is exact to `tolerance` (a share). If attainment is not monotone in the rate, the result is the
    first crossing that the search finds. The searches advance together, so that `run` gets a case per policy
    and seed at a time. Raises InvalidValue.

    start: rate to try first. progress: called with the simulations done and those known to be needed.
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
    best = [0.0] * len(policies)
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
            reached = fmean(value(simulated.summary) for simulated in mine) >= goal
            best[index] = max(best[index], rate) if reached else best[index]
            try:
                rates[index] = searches[index].send(reached)
            except StopIteration:
                del rates[index]
    return {
        policy_name(policy): Goodput(rate, tuple(sorted(tried, key=_order)))
        for policy, rate, tried in zip(policies, best, reports, strict=True)
    }


def _order(report: Report) -> tuple[float, int]:
    return report.rate, report.seed


def _search(start: float, tolerance: float) -> Generator[float, bool, None]:
    """Yield rates to try and receive whether each was sustained: double or halve to a bracket, then bisect."""
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
