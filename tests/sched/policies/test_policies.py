"""Decisions of policies on small views."""

from __future__ import annotations

import pytest

from jaxserve.sched import policies
from jaxserve.sched.api.policy import Limits, Role
from jaxserve.sched.api.request import BEST_EFFORT, State
from jaxserve.sched.api.slo import NO_SLO
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.policies.continuous import Continuous
from jaxserve.sched.policies.fcfs import Fcfs
from jaxserve.sched.policies.kairos.decode import KairosDecode
from jaxserve.sched.policies.kairos.prefill import KairosPrefill
from tests.support.sched.views import decoding, order, prompt, view


def test_fcfs_is_by_arrival_and_best_effort_last() -> None:
    at = view([prompt(3, 10, 2.0), prompt(1, 10, 1.0), prompt(2, 10, 0.0, tier=BEST_EFFORT)], [])
    assert order(Fcfs(), at) == [1, 3, 2]


def test_kairos_serves_a_short_prompt_before_a_long_one_that_came_first() -> None:
    at = view([prompt(0, 6000, 0.0), *(prompt(1 + i, 100, 0.1) for i in range(3))], [])
    assert order(KairosPrefill(), at) == [1, 2, 3, 0]
    assert order(Fcfs(), at) == [0, 1, 2, 3]


def test_kairos_does_not_put_the_longest_late_prompt_first() -> None:
    """Dividing a negative slack by the length, as published, would put it first."""
    at = view([prompt(0, 9000, -20.0), prompt(1, 100, -20.0)], [], start=0.0)
    assert order(KairosPrefill(), at) == [1, 0]


def test_kairos_serves_requests_without_an_objective_last() -> None:
    at = view([prompt(0, 10, 0.0, NO_SLO), prompt(1, 9000, 0.0)], [])
    assert order(KairosPrefill(), at) == [1, 0]


def test_kairos_decodes_the_short_row_alone_while_the_long_one_has_slack() -> None:
    # all rows: 110 ms; the short row alone: 11 ms
    short = decoding(0, 1000, due=0.050)
    patient, pressed = decoding(1, 100_000, due=0.400), decoding(1, 100_000, due=0.115)
    assert order(KairosDecode(), view([], [short, patient], role=Role.DECODE)) == [0]
    assert order(KairosDecode(), view([], [short, pressed], role=Role.DECODE)) == [0, 1]  # 5 ms of slack are not enough
    assert order(Continuous(), view([], [short, patient], role=Role.DECODE)) == [0, 1]


def test_kairos_decodes_every_row_under_kv_pressure() -> None:
    rows = [decoding(0, 1000, due=0.200), decoding(1, 100_000, due=0.400)]
    assert order(KairosDecode(), view([], rows, role=Role.DECODE, kv_waiting=1)) == [0, 1]
    assert order(KairosDecode(), view([], rows, role=Role.DECODE, free_pages=199)) == [0, 1]


def test_one_hopeless_row_does_not_exclude_the_others_and_does_not_starve() -> None:
    rows = [decoding(0, 1000, due=0.300, last=-0.01), decoding(1, 2000, due=0.300, last=-0.01)]
    late = decoding(2, 150_000, due=-1.0, last=-0.1)
    assert order(KairosDecode(), view([], [*rows, late], role=Role.DECODE)) == [0, 1]
    starved = decoding(2, 150_000, due=-1.0, last=-0.3)  # six times its TPOT without a token
    assert set(order(KairosDecode(), view([], [*rows, starved], role=Role.DECODE))) == {0, 1, 2}


def test_halves_put_their_own_side_first() -> None:
    halves = policies.make("distserve")
    requests = [prompt(0, 10)], [decoding(1, 100, due=1.0)]
    assert order(halves, view(*requests, role=Role.PREFILL)) == [0, 1]
    assert order(halves, view(*requests, role=Role.DECODE)) == [1, 0]
    assert order(halves, view(*requests, role=Role.MIXED)) == [1, 0]


def test_waiting_requests_beyond_the_row_limit_never_hide_a_running_one() -> None:
    requests = [prompt(i, 10, float(i)) for i in range(9)]
    requests[8].state = State.RUNNING
    at = view(requests, [], limits=Limits(8192, 2, 1000, 16))
    assert order(Fcfs(), at) == [0, 1, 8]


@pytest.mark.parametrize("name", ["kairos:literal", "kairos:verbatim", "prefill=fcfs,decode=kairos:literal"])
def test_kairos_to_the_letter_lets_one_late_straggler_forbid_everything(name: str) -> None:
    """Line 7: the straggler has the least slack, so all rows decode together until it ends."""
    rows = [decoding(0, 1000, due=0.300, last=-0.01), decoding(1, 2000, due=0.300, last=-0.01)]
    late = decoding(2, 150_000, due=-1.0, last=-0.1)
    assert order(policies.make("kairos"), view([], [*rows, late], role=Role.DECODE)) == [0, 1]
    assert order(policies.make(name), view([], [*rows, late], role=Role.DECODE)) == [0, 1, 2]


def test_literal_kairos_takes_a_step_alone_as_the_need_of_a_row() -> None:
    """Line 5 overlooks that a row waits and then decodes jointly with others.

    The long row alone needs 110 ms and is due in 130 ms. With 20 ms of slack the short rows run
    alone, though all three then need a joint step of 112.5 ms.
    """
    perf = GeneralModel(Coefficients(0.010, 1e-3, decode=0.004, quadratic=0.0, longest=1e-6, context=0.0))
    rows = [decoding(0, 1000, due=0.300), decoding(1, 100_000, due=0.136)]
    # alone 114 ms: slack 22 ms >= 15 ms of the short row; together 118 ms: slack 18 ms, still; margin takes it
    at = view([], rows, role=Role.DECODE, perf=perf)
    assert order(policies.make("kairos:literal"), at) == [0]
    assert order(policies.make("kairos"), at) == [0]
    assert order(policies.make("kairos:margin=0.05"), at) == [0, 1]
    tight = view([], [decoding(0, 1000, due=0.300), decoding(1, 100_000, due=0.1305)], role=Role.DECODE, perf=perf)
    assert order(policies.make("kairos:literal"), tight) == [0]  # 16.5 ms of slack: the joint step then comes too late
    assert order(policies.make("kairos"), tight) == [0, 1]


def test_kairos_to_the_letter_leaves_rows_out_though_kv_is_short() -> None:
    rows = [decoding(0, 1000, due=0.200), decoding(1, 100_000, due=0.400)]
    at = view([], rows, role=Role.DECODE, kv_waiting=1)
    assert order(policies.make("kairos:literal"), at) == [0]
    assert order(policies.make("kairos"), at) == [0, 1]


def test_the_greedy_prefix_stops_at_the_first_local_maximum() -> None:
    """Rows of 1,000, 30,000 and then twenty of 31,000 tokens: the second costs more than it adds, all of them less."""
    rows = [decoding(i, length, due=1.0) for i, length in enumerate([1000, 30_000, *[31_000] * 20, 400_000])]
    at = view([], rows, role=Role.DECODE)
    assert order(policies.make("kairos:greedy"), at) == [0]
    assert order(policies.make("kairos"), at) == list(range(22))


def test_best_effort_rows_decode_behind_the_others_and_forbid_nothing() -> None:
    rows = [decoding(0, 1000, due=0.3), decoding(1, 2000, due=0.3), decoding(2, 100_000, due=0.4)]
    straggler = decoding(3, 500, due=-1.0)
    straggler.tier = BEST_EFFORT
    assert order(policies.make("kairos"), view([], [*rows, straggler], role=Role.DECODE)) in ([0, 1], [0, 1, 3])


def test_kairos_accepts_steps_that_take_no_time() -> None:
    """A table may predict zero: this must not warn of a division by zero."""
    perf = GeneralModel(Coefficients(0.0, 1e-3, 0.0, 0.0, 0.0, 0.0), correct=False)
    rows = [decoding(1, 10, 1.0), decoding(2, 20, 2.0)]
    assert order(KairosDecode(), view([], rows, perf=perf, role=Role.DECODE)) == [1]
