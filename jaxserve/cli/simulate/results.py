"""Results of simulations, and the figures computed from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import nan
from statistics import fmean
from typing import NamedTuple

from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.sched.metrics import CLASSES, GOAL, Summary
from jaxserve.sched.sim import Report
from jaxserve.sched.sim.bounds import Bounded

Value = Callable[[Summary], float]


def _of_length(name: str) -> Value:
    return lambda summary: summary.by_length[name].attained


def of_class(name: str) -> Value:
    return lambda summary: summary.by_class[name].attained if name in summary.by_class else nan


VALUES: dict[str, Value] = {  # attainment for goodput, by --attain
    "both": lambda s: s.attained,
    "ttft": lambda s: s.ttft_attained,
    "tpot": lambda s: s.tpot_attained,
    "worst": lambda s: s.worst_attained,
    "window": lambda s: s.window_attained,
    "tokens": lambda s: s.token_weighted,
}

SHARES: dict[str, Value] = {
    "both": VALUES["both"],
    "TTFT": VALUES["ttft"],
    "TPOT": VALUES["tpot"],
    "tokens": VALUES["tokens"],
    **{name: _of_length(name) for name, _ in CLASSES},
}

FIGURES: dict[str, Value] = {
    "tok/s": lambda s: s.median_speed,
    "all": lambda s: s.output_throughput,
}

SPREADS = ("ttft", "tpot", "worst_tpot", "window_tpot", "largest_gap")

PERCENTILES = ("p50", "p95", "p99")


def of_spread(name: str, percentile: str) -> Value:
    return lambda summary: float(getattr(getattr(summary, name), percentile))


FLAT: dict[str, Value] = {  # columns of the CSV file
    "attained": VALUES["both"],
    "ttft_attained": VALUES["ttft"],
    "tpot_attained": VALUES["tpot"],
    "worst_attained": VALUES["worst"],
    "window_attained": VALUES["window"],
    "token_weighted": VALUES["tokens"],
    **{f"attained_{name}": SHARES[name] for name, _ in CLASSES},
    "median_speed_tok_s": lambda s: s.median_speed,
    "output_throughput_tok_s": lambda s: s.output_throughput,
    "request_goodput_req_s": lambda s: s.request_goodput,
    **{f"{name}_{part}_s": of_spread(name, part) for name in SPREADS for part in PERCENTILES},
}


class Results(NamedTuple):
    """All simulated reports, and derived figures.

    goodput: requests per second by policy; None if no rate reached the goal. searched: the rates come
    from a search. bounds, goodput_bound: upper bounds for all policies, if requested. slo: the objectives that all
    requests have in common. legend: lines that explain names in the tables.
    """

    title: str
    reports: Sequence[Report]
    goodput: Mapping[str, float | None]
    goal: float = GOAL
    attain: str = "both"
    searched: bool = False
    bounds: Sequence[Bounded] = ()
    goodput_bound: float | None = None
    slo: SLO = NO_SLO
    legend: Sequence[str] = ()

    @property
    def policies(self) -> list[str]:
        return list(dict.fromkeys(report.policy for report in self.reports))

    def cells(self) -> dict[tuple[str, float], list[Report]]:
        """Return reports by policy and rate; each cell has one report per seed."""
        cells: dict[tuple[str, float], list[Report]] = {}
        for report in self.reports:
            cells.setdefault((report.policy, report.rate), []).append(report)
        return cells

    def bound_at(self) -> dict[float, float]:
        """Return the upper bound on attainment by rate, as a mean over seeds."""
        shares: dict[float, list[float]] = {}
        for bound in self.bounds:
            shares.setdefault(bound.rate, []).append(bound.bound.share)
        return {rate: fmean(each) for rate, each in sorted(shares.items())}

    @property
    def at_least(self) -> frozenset[str]:
        """Policies that reached the goal at the highest simulated rate: their goodput may be higher."""
        highest = max((report.rate for report in self.reports), default=None)
        if self.searched:
            return frozenset()
        return frozenset(policy for policy, rate in self.goodput.items() if rate is not None and rate == highest)

    @property
    def below(self) -> frozenset[str]:
        """Policies that missed the goal at the lowest simulated rate: their goodput is lower."""
        return frozenset(policy for policy, rate in self.goodput.items() if rate is None)

    def attained(self, policy: str) -> dict[float, float]:
        """Return attainment by rate, as a mean over seeds."""
        cells = sorted((rate, cell) for (name, rate), cell in self.cells().items() if name == policy)
        return {rate: fmean(VALUES[self.attain](report.summary) for report in cell) for rate, cell in cells}

    def again(self, policy: str) -> list[float]:
        """Return rates that reach the goal above a rate that misses it; they do not count as goodput."""
        limit = self.goodput.get(policy) or 0.0
        return [rate for rate, share in self.attained(policy).items() if rate > limit and share >= self.goal]

    def classes(self) -> list[str]:
        return sorted({name for report in self.reports for name in report.summary.by_class})
