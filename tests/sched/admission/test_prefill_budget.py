"""The prefill admission budget: its formula against hand-computed values, admission and routing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched import admission
from jaxserve.sched.admission.prefill_budget import line, prefill_budget
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.perf import Load, PerfModel
from jaxserve.sched.api.policy import Limits, Role, View
from jaxserve.sched.api.request import BEST_EFFORT, Request, State
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.perf.buckets import Buckets, Padded
from jaxserve.sched.perf.linear import LinearModel
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.policies.sarathi import Sarathi
from jaxserve.sched.routing.base import Fleet
from jaxserve.sched.routing.fewest_requests import FewestRequests
from jaxserve.sched.routing.prefill_budget import PrefillBudget
from tests.support.examples import examples
from tests.support.sched import views

PROMISED = SLO(ttft=0.5, tpot=0.05)
# a = 10 ms, b = b_dec = 0.1 ms, c = 0.1 us
EXACT = Coefficients(fixed=0.010, prefill=1e-4, decode=1e-4, quadratic=0.0, longest=1e-7, context=1e-7)
PERF = GeneralModel(EXACT, correct=False)


def waiting(id: int, tokens: int, due: float, tier: str = "standard") -> Request:
    return Request(id, NewRequest(range(tokens), SamplingParams(), PROMISED, tier=tier), due - PROMISED.ttft)


def decoding(id: int, context: int, due: float, tier: str = "standard") -> Request:
    one = Request(id, NewRequest(range(context), SamplingParams(max_tokens=1000), PROMISED, tier=tier), 0.0)
    one.state, one.computed, one.output = State.RUNNING, context, [1]
    one.first_token_at, one.token_times, one.budget = 0.0, [0.0], due
    return one


def view(prefill: list[Request], decode: list[Request]) -> View:
    return views.view(prefill, decode, role=Role.MIXED, perf=PERF)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 63, 64, 65])
def test_padded_steps_cost_their_padded_size(rows: int) -> None:
    """At the edge of a padding bucket, the next row costs the whole bucket; that must not be the price of each row."""
    sizes = tuple(2**power for power in range(9))
    perf = GeneralModel(Padded(EXACT, Buckets(sizes, ())), correct=False)
    near = line(perf, rows, 1000.0)
    assert near.step + rows * (near.row + near.context * 1000) == pytest.approx(
        perf.step_time(Load().add_rows(rows, 1000, 1000 * rows))
    )


def test_a_hand_computed_budget() -> None:
    """Rows due in 50 and 150 ms take 10 and 8 steps within 500 ms; a prompt due in 400 ms takes 3."""
    at = view([waiting(0, 500, due=0.4)], [decoding(1, 1000, due=0.05), decoding(2, 3000, due=0.15)])
    free = 0.5 - 0.010 * 10 - 10 * (1e-4 + 1e-7 * 1000) - 8 * (1e-4 + 1e-7 * 3000) - 3 * (1e-4 + 1e-7 * 500)
    assert prefill_budget(at, due=0.5) == pytest.approx(free / (1e-4 + 1e-7) - 500)


def test_rows_without_a_step_before_the_deadline_and_best_effort_cost_nothing() -> None:
    patient, last = decoding(1, 1000, due=0.5), decoding(2, 1000, due=0.1, tier=BEST_EFFORT)
    queued = waiting(3, 900, due=0.1, tier=BEST_EFFORT)
    assert prefill_budget(view([queued], [patient, last]), due=0.5) == prefill_budget(view([], []), due=0.5)


def slopes(perf: PerfModel, rows: int, longest: float) -> tuple[float, float, float, float]:
    found = line(perf, rows, longest)
    return found.step, found.token(perf, 1024, 8192), found.row, found.context


def test_a_linear_model_is_its_own_linearization() -> None:
    assert slopes(LinearModel(0.01, 2e-4, 3e-7), 7, 5000.0) == pytest.approx((0.01, 2e-4, 2e-4, 3e-7))


def test_the_longest_row_adds_to_every_step_if_it_costs_more() -> None:
    straggler = GeneralModel(replace(EXACT, longest=1e-6), correct=False)
    assert slopes(straggler, 2, 5000.0) == pytest.approx((0.01 + 9e-7 * 5000, 1e-4, 1e-4, 1e-7))


LENGTHS = st.integers(1, 4000)
TIMES = st.floats(-1, 1)


@given(
    rows=st.lists(st.tuples(LENGTHS, TIMES), max_size=8),
    prompts=st.lists(st.tuples(LENGTHS, TIMES), max_size=4),
    more=st.tuples(LENGTHS, TIMES),
)
@settings(max_examples=examples(100))
def test_another_request_never_raises_the_budget(rows, prompts, more) -> None:  # type: ignore[no-untyped-def]
    decode = [decoding(id, *row) for id, row in enumerate(rows)]
    prefill = [waiting(100 + id, *prompt) for id, prompt in enumerate(prompts)]
    before = prefill_budget(view(prefill, decode), due=0.5)
    assert prefill_budget(view(prefill, [*decode, decoding(200, *more)]), due=0.5) <= before + 1e-6
    assert prefill_budget(view([*prefill, waiting(200, *more)], decode), due=0.5) <= before - more[0] + 1e-6


def scheduler() -> Scheduler:
    return Scheduler(Sarathi(), PERF, Limits(8192, 256, 6000, 16), prefix_caching=False)


def test_routes_to_the_largest_budget() -> None:
    fleet = Fleet(0.0, [scheduler(), scheduler(), scheduler()], lambda tokens: 0.0)
    fleet.instances[0].add(waiting(0, 2000, due=0.5))
    fleet.instances[1].add(waiting(1, 100, due=0.5))
    fleet.instances[2].add(waiting(2, 300, due=0.5))
    assert PrefillBudget().prefill(waiting(3, 10, due=0.5), fleet) == [1, 2, 0]


def test_without_a_deadline_every_request_is_admitted_and_routed_to_the_least_work() -> None:
    """An infinite deadline gives an infinite budget, never NaN, even if rows cost nothing."""
    free = GeneralModel(replace(EXACT, decode=0.0, longest=0.0, context=0.0), correct=False)
    fleet = Fleet(0.0, [scheduler(), scheduler()], lambda tokens: 0.0)
    fleet.instances[0].add(waiting(0, 2000, due=0.5))
    fleet.instances[1].add(waiting(1, 100, due=0.5))
    for model in (PERF, free):
        assert prefill_budget(replace(view([], [decoding(0, 100, 0.1)]), perf=model), float("inf")) == float("inf")
    assert admission.make("pab:refuse").admits(waiting(2, 5000, due=float("inf")), fleet.instances[0], 0.0)
    place = PrefillBudget()
    assert [place.prefill(waiting(id, 1500, due=float("inf")), fleet)[0] for id in (3, 4, 5)] == [1, 1, 0]


def test_routed_requests_count_before_they_reach_the_instance() -> None:
    """The test never adds the requests to the schedulers, so to the router they are still on their way."""
    fleet = Fleet(0.0, [scheduler(), scheduler()], lambda tokens: 0.0)
    for place in (PrefillBudget(), FewestRequests()):
        sent = [waiting(id, 100, due=0.5) for id in range(4)]
        assert [place.prefill(request, fleet)[0] for request in sent] == [0, 1, 0, 1]
        sent[1].state = State.FINISHED
        sent[3].output = [7]  # its prompt is computed, so it no longer counts
        assert [place.prefill(waiting(id, 100, due=0.5), fleet)[0] for id in (4, 5)] == [1, 1]


def test_waiting_requests_count_four_times() -> None:
    fleet = Fleet(0.0, [scheduler(), scheduler()], lambda tokens: 0.0)
    for id in range(3):
        fleet.instances[0].add(waiting(id, 10, due=0.5))
        assert fleet.instances[0].plan(0.0, 0.0) is not None
    fleet.instances[1].add(waiting(3, 5000, due=0.5))
    assert FewestRequests().prefill(waiting(4, 10, due=0.5), fleet) == [0, 1]


def test_among_equal_budgets_a_cached_prefix_decides() -> None:
    one, other = (Scheduler(Sarathi(), PERF, Limits(8192, 256, 6000, 16)) for _ in range(2))
    held = Request(0, NewRequest(range(160), SamplingParams(max_tokens=1), PROMISED), 0.0)
    pages = other.blocks.take((), 10)
    assert pages is not None
    for page, digest in zip(pages, other._kv.digests(held, 160), strict=True):
        other.blocks.register(page, digest, b"")
    fleet = Fleet(0.0, [one, other], lambda tokens: 0.0)
    assert PrefillBudget().prefill(waiting(1, 161, due=0.5), fleet) == [1, 0]
