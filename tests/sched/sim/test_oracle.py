"""The clairvoyant bound: exact if it says so, and never below what a policy attains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.sim import Arrival
from jaxserve.sched.sim.oracle import Bound, Details, bound, goodput_bound, most_on_time, most_value
from jaxserve.sched.sim.oracle.work import Server, jobs
from tests.support.examples import examples

FREE = Coefficients(0.0, 1.0, 0.0, 0.0, 0.0, 0.0)  # one second per prompt token
Jobs = list[tuple[int, int, int]]  # release, length of the window, work
JOBS: st.SearchStrategy[Jobs] = st.lists(
    st.tuples(st.integers(0, 10), st.integers(1, 8), st.integers(0, 6)), min_size=1, max_size=8
)


def columns(jobs: Jobs, window: int | None = None) -> tuple[Any, Any, Any]:
    release, length, work = np.array(jobs, dtype=float).T
    return release, release + (length if window is None else window), work


def brute_force(release: Any, deadline: Any, work: Any) -> int:
    """Return the largest set that fits into every interval, which is optimal for a preemptive server."""
    count = len(work)
    inside = [(release >= a) & (deadline <= b) for a in release for b in deadline]
    lengths = [max(b - a, 0.0) for a in release for b in deadline]
    sets = [np.array([mask >> job & 1 for job in range(count)], dtype=bool) for mask in range(1 << count)]
    return max(
        int(chosen.sum())
        for chosen in sets
        if all(work[chosen & here].sum() <= length for here, length in zip(inside, lengths, strict=True))
    )


@settings(deadline=None, max_examples=examples(50))
@given(JOBS, st.integers(1, 8))
def test_kise_ibaraki_mine_is_exact(jobs: Jobs, window: int) -> None:
    release, deadline, work = columns(jobs, window)
    assert most_on_time(release, deadline, work) == brute_force(release, deadline, work)


def test_four_thousand_requests_are_solved() -> None:
    random = np.random.default_rng(0)
    release = np.cumsum(random.exponential(0.2, 4000))
    work = random.lognormal(-1.5, 1.0, 4000)
    assert 3000 < most_on_time(release, release + 8.0, work) < 4000


@settings(deadline=None, max_examples=examples(60))
@given(JOBS, st.lists(st.floats(0.1, 1.0), min_size=8, max_size=8))
@example([(0, 4, 2), (1, 1, 1), (0, 4, 1)], [1.0] * 8)
def test_windows_solve_the_linear_program(jobs: Jobs, values: list[float]) -> None:
    release, deadline, work = columns(jobs)
    value = np.array(values[: len(jobs)])
    intervals = [(a, b) for a in release for b in deadline if b > a]
    inside = [np.where((release >= a) & (deadline <= b), work, 0.0) for a, b in intervals]
    solved = linprog(-value, A_ub=inside, b_ub=[b - a for a, b in intervals], bounds=(0, 1))
    assert most_value(release, deadline, work, value) == pytest.approx(-solved.fun, abs=1e-6)


def simple(count: int = 40, **slo: float) -> list[Arrival]:
    return [Arrival(1.0 * i, 2 + i % 3, 1, SLO(**({"ttft": 8.0} | slo))) for i in range(count)]


def test_more_servers_and_looser_slos_never_hurt() -> None:
    arrivals = [*simple(), *simple(ttft=5.0)]
    counts = [bound(arrivals, FREE, servers, 0, deflection=False, chunk=8).attained for servers in (1, 2, 3, 6)]
    assert counts == sorted(counts) and counts[0] < counts[-1] == 80
    ttfts = [bound(simple(ttft=ttft), FREE, 1, 0, deflection=False, chunk=8).attained for ttft in (2, 4, 8, 99)]
    assert ttfts == sorted(ttfts) and ttfts[0] < ttfts[-1]
    without = bound(arrivals, FREE, 1, 1, deflection=False, chunk=8)
    with_it = bound(arrivals, FREE, 1, 1, deflection=True, chunk=8)
    assert without.attained < with_it.attained
    assert with_it.attained == bound(arrivals, FREE, 0, 2, deflection=True, chunk=8).attained


def test_requests_that_are_infeasible_alone_do_not_count() -> None:
    arrivals = [Arrival(0.0, 9, 1), Arrival(50.0, 7, 1), Arrival(99.0, 8, 1)]
    assert bound(arrivals, FREE, 4, 0, deflection=False, chunk=8) == Bound(2, 3, "alone", 1)
    slow = Coefficients(0.06, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert bound([Arrival(0.0, 9, 9)], slow, 1, 1, deflection=False, chunk=8).impossible == 1
    assert bound([Arrival(0.0, 9, 1)], slow, 1, 1, deflection=False, chunk=8).impossible == 0


def test_a_repeated_prefix_costs_nothing() -> None:
    arrivals = [Arrival(0.0, 6, 1, hash_ids=(1, 2), block=3.0), Arrival(0.0, 7, 1, hash_ids=(1, 2), block=3.0)]
    assert jobs(arrivals, Server(FREE, 8, 8, 0, None)).fresh.tolist() == [6, 1]
    assert bound(arrivals, FREE, 1, 0, deflection=False, chunk=8).attained == 2
    details = Details(prefix_caching=False)
    assert bound(arrivals, FREE, 1, 0, deflection=False, chunk=8, details=details).attained == 1


def test_decodes_bind_if_they_are_most_of_the_work() -> None:
    step = Coefficients(fixed=0.01, prefill=1e-6, decode=0.004, quadratic=0.0, longest=0.0, context=0.0)
    arrivals = [Arrival(0.0, 10, 101, SLO(1.0, 0.05)) for _ in range(60)]
    apart = bound(arrivals, step, 1, 1, deflection=False, chunk=8192)
    # 6 s for 100 tokens each: 4 ms a token, and 10 ms a step shared by 60 rows
    assert apart == Bound(int(6 / (100 * (0.004 + 0.01 / 60))), 60, "decodes", 0)
    assert bound(arrivals, step, 1, 2, deflection=False, chunk=8192).attained == 28
    both = Coefficients(fixed=0.0, prefill=0.01, decode=0.01, quadratic=0.0, longest=0.0, context=0.0)
    arrivals = [Arrival(0.0, 100, 101, SLO(6.0, 0.02)) for _ in range(12)]
    assert bound(arrivals, both, 0, 1, deflection=True, chunk=8192) == Bound(4, 12, "all work", 0)


@pytest.mark.parametrize("skip", [0, 5])
def test_goodput_of_equal_jobs(skip: int) -> None:
    """Of 300 requests of one second each, 270 must fit into the time of 300 arrivals plus 8 s."""
    arrivals = [Arrival(float(i), 1, 1) for i in range(300 + 2 * skip)]
    rate = goodput_bound(arrivals, FREE, 1, 0, deflection=False, chunk=8, details=Details(skip=skip))
    assert rate == pytest.approx(299 / (270 - 8), rel=0.01)
    twice = goodput_bound(arrivals, FREE, 1, 1, deflection=True, chunk=8, details=Details(skip=skip))
    assert twice > 1.9 * rate


def test_goodput_of_rates_that_always_or_never_hold() -> None:
    assert goodput_bound(simple(3, ttft=99.0), FREE, 1, 0, deflection=False, chunk=8) == float("inf")
    assert goodput_bound(simple(9, ttft=0.5), FREE, 1, 0, deflection=False, chunk=8) == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: most_on_time([0, 1], [9, 8], [1, 1]), "ordered as release"),
        (lambda: most_on_time([0, 1], [8, 9], [1, -1]), "seconds=-1.0"),
        (lambda: most_on_time([0, 1], [8, 9], [1]), "must be as many"),
        (lambda: bound(simple(), FREE, 0, 2, deflection=False, chunk=8), "prefill_servers=0"),
        (lambda: bound(simple(), FREE, -1, 2, deflection=True, chunk=8), "prefill_servers=-1"),
        (lambda: bound(simple(), FREE, 1, 0, deflection=False, chunk=0), "tokens=0"),
        (lambda: bound(simple(), FREE, 1, 0, deflection=False, chunk=8, details=Details(rows=0)), "rows=0"),
        (lambda: bound(simple(4), FREE, 1, 0, deflection=False, chunk=8, details=Details(skip=2)), "skip=2"),
        (lambda: bound([], FREE, 1, 0, deflection=False, chunk=8), "skip=0"),
        (lambda: goodput_bound(simple(), FREE, 1, 0, deflection=False, chunk=8, goal=0.0), "goal=0.0"),
        (lambda: goodput_bound(simple(), FREE, 1, 0, deflection=False, chunk=8, tolerance=0.0), "tolerance=0.0"),
        (lambda: goodput_bound([Arrival(1.0, 1, 1)], FREE, 1, 0, deflection=False, chunk=8), "have no rate"),
    ],
)
def test_invalid_arguments_are_named(call: Any, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        call()
