"""Feasibility of deadlines: against brute force and hand-computed values."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.policy import Role, View
from jaxserve.sched.api.request import BEST_EFFORT, Request, State
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.feasibility import (
    decode_load,
    joiners_bound,
    late_joiners,
    mixed_bound,
    on_time_set,
    piggyback_speed,
)
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from tests.support.examples import examples
from tests.support.sched.views import view as view_of

# 10 ms a step, 1 ms a prompt token, 1 ms a row, 1 us a token of the longest context, 0.1 us of any other
PERF = GeneralModel(Coefficients(0.010, 1e-3, 1e-3, 0.0, 1e-6, 1e-7), correct=False)


def view(prefill: list[Request], decode: list[Request], **more: Any) -> View:
    return view_of(prefill, decode, **{"perf": PERF, "role": Role.DECODE, **more})


JOBS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 20), st.booleans()), max_size=8)  # work, deadline, heavy


def on_time(start: float, jobs: list[tuple[int, int, bool]], chosen: tuple[int, ...]) -> bool:
    """Return whether one server finishes these jobs in time in EDF order, which is optimal."""
    at = start
    for work, due, _ in sorted((jobs[index] for index in chosen), key=lambda job: job[1]):
        at += work
        if at > due:
            return False
    return True


def solve(start: float, jobs: list[tuple[int, int, bool]], light: float = 1.0, heavy: float = 1.0) -> tuple[int, ...]:
    work, due, is_heavy = (np.array(column) for column in zip(*jobs, strict=True)) if jobs else (np.zeros(0),) * 3
    weight = None if light == heavy == 1.0 else np.where(is_heavy.astype(bool), heavy, light)
    return tuple(np.flatnonzero(on_time_set(start, due.astype(float), work.astype(float), weight)).tolist())


@given(jobs=JOBS, start=st.integers(0, 5))
@settings(max_examples=examples(200))
def test_no_larger_set_is_on_time(jobs: list[tuple[int, int, bool]], start: int) -> None:
    chosen = solve(start, jobs)
    assert on_time(start, jobs, chosen)
    larger = combinations(range(len(jobs)), len(chosen) + 1)
    assert not any(on_time(start, jobs, each) for each in larger)


@given(jobs=JOBS, start=st.integers(0, 5))
@settings(max_examples=examples(200))
def test_heavy_jobs_stay_while_they_alone_are_on_time(jobs: list[tuple[int, int, bool]], start: int) -> None:
    chosen = solve(start, jobs, 1.0, 1000.0)
    assert on_time(start, jobs, chosen)
    stay = tuple(index for index, (work, due, heavy) in enumerate(jobs) if heavy and start + work <= due)
    if on_time(start, jobs, stay):
        assert set(stay) <= set(chosen)
        rest = [index for index in range(len(jobs)) if index not in stay]
        more = combinations(rest, len(chosen) - len(stay) + 1)
        assert not any(on_time(start, jobs, (*stay, *each)) for each in more)


def row(id: int, due: float, tpot: float, tier: str = "standard") -> Request:
    one = Request(id, NewRequest(range(1000), SamplingParams(max_tokens=1000), SLO(tpot=tpot), tier=tier), 0.0)
    one.state, one.computed, one.output = State.RUNNING, 1000, [1]
    one.first_token_at, one.token_times, one.budget = 0.0, [0.0], due
    return one


def test_the_mixed_bound_by_hand() -> None:
    """With TPOTs of 100 and 80 ms, due 90 and 130 ms after the step can begin, the slack is 90 ms."""
    at = view([], [row(0, 5.09, 0.1), row(1, 5.13, 0.08), row(2, 0.0, 0.01, BEST_EFFORT)], now=4.9, start=5.0)
    assert mixed_bound(at, 1.0, 0.75) == pytest.approx(0.080)  # a whole TPOT, since all rows have more slack
    assert mixed_bound(at, 1.0, 0.75, stretch=2.0) == pytest.approx(0.090)  # limited by the slack
    assert mixed_bound(at, 1.0, 0.75, stretch=2.0, cushion=0.25) == pytest.approx(0.070)
    assert mixed_bound(at, 1.0, 0.75, stretch=2.0, cushion=1.0) == pytest.approx(0.75 * 0.080)  # at least the share
    assert mixed_bound(at, 1.0, share=0.95, cushion=1.0) == pytest.approx(0.95 * 0.080)
    late = view([], [row(0, -5.0, 0.1)])
    assert mixed_bound(late, 1.0, 0.75) == pytest.approx(0.075)
    best_effort = view([], [row(2, 0.0, 0.01, BEST_EFFORT)])
    assert mixed_bound(view([], []), 1.0, 0.75) == mixed_bound(best_effort, 1.0, 0.75) == inf


def test_the_step_bound_lets_rows_that_joined_late_catch_up() -> None:
    """A step of all rows takes 12 ms. With TPOTs of 50 ms, one row is due in 30 ms; one in 5 and then in 55 ms."""

    def bound(*rows: Request, few: int = 3) -> float:
        at = view([], list(rows))
        return joiners_bound(at, at.perf.step_time(decode_load(at.decode)), few)

    assert bound(row(0, 0.030, 0.05)) == pytest.approx(0.97 * 0.030)
    assert bound(row(0, 0.005, 0.05)) == pytest.approx(0.97 * 0.055 / 2)
    assert bound(row(0, -0.080, 0.05), few=4) == pytest.approx(0.97 * 0.070 / 4)
    assert bound(row(0, -0.080, 0.05)) == inf  # too late to catch up, so other rows need not wait for it
    assert bound(row(0, 0.030, 0.05), row(1, -0.080, 0.05)) == pytest.approx(0.97 * 0.030)
    assert bound(row(0, 0.030, 0.05, BEST_EFFORT)) == bound(row(0, 0.0, inf)) == bound() == inf
    old = row(0, 0.030, 0.05)
    old.output, old.computed = [1] * 5, old.computed + 4
    assert bound(old) == inf
    assert bound(old, few=4) == pytest.approx(0.97 * 0.030)


def test_a_row_that_joined_late_decodes_alone_where_the_others_can_wait() -> None:
    """A step of ten rows takes 21.9 ms, one of the first 12 ms, of TPOTs of 40 ms."""

    def alone(due: float, *, others: float = 0.2, tokens: int = 9) -> list[int]:
        old = [row(id, others, 0.04) for id in range(1, 10)]
        for one in old:
            one.output, one.computed = [1] * tokens, one.computed + tokens - 1
        return late_joiners(view([], [row(0, due, 0.04), *old]), 4).tolist()

    assert alone(0.0) == [0]  # after two steps of all rows it would be 4 ms late, and 6 ms early after its own
    assert alone(0.006) == []  # on time with its next token but one
    assert alone(-0.010) == []  # too late for either
    assert alone(0.0, others=0.030) == []  # which would be late behind it
    assert alone(0.0, others=0.020) == [0]  # which are late anyway
    assert alone(0.0, tokens=3) == []  # ten such steps in four tokens take 120 ms, of which 72 are left


def test_piggybacked_prefill_gets_the_time_left_by_decodes() -> None:
    """A step of one row takes 10 + 1 + 1 ms of 80."""
    at = view([], [row(0, 9.0, 0.1)])
    assert piggyback_speed(at, 0.080) == pytest.approx(1 - 0.012 / 0.080)
    assert piggyback_speed(at, 0.012) == pytest.approx(0.0, abs=1e-12) and piggyback_speed(at, 0.001) == 0.0
    assert piggyback_speed(at, inf) == piggyback_speed(view([], []), 0.080) == 1.0
    assert all(one <= more for one, more in pairwise(piggyback_speed(at, 0.01 * n) for n in range(1, 9)))
