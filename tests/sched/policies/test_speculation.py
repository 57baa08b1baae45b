"""Drafting and verification: PB* with drafts, and no token lost or invented."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.acceptance import Drafts
from jaxserve.sched.api.new_request import STANDARD
from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.policy import Decision, Grant, Role, View
from jaxserve.sched.api.request import BEST_EFFORT, State
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.policies.slos_serve.speculation import PrefillSupply, StepCosts, accepted, counted_on, prompt_room
from tests.support.examples import examples
from tests.support.sched.complete import check_told
from tests.support.sched.harness import Job, every, simulate
from tests.support.sched.speculation import JOB, check

# ---- gain by drafts and remaining step time
# --------------------------------------------------------------------------


@given(st.floats(0, 0.999), st.integers(1, 10))
def test_another_drafted_token_gains_its_chance_of_acceptance(acceptance: float, length: int) -> None:
    """A drafted token counts only if all drafted tokens before it are right."""
    more = accepted(acceptance, length + 1) - accepted(acceptance, length)
    assert more == pytest.approx(acceptance**length, abs=1e-9)


@given(st.floats(0, 0.99), st.integers(1, 10), st.floats(0, 3))
def test_caution_never_increases_the_expected_gain(acceptance: float, length: int, caution: float) -> None:
    assert counted_on(acceptance, length, 0.0) == pytest.approx(accepted(acceptance, length))
    assert 1.0 <= counted_on(acceptance, length, caution) <= accepted(acceptance, length) + 1e-9
    assert counted_on(acceptance, 1, caution) == 1.0 and counted_on(1.0, length, caution) == pytest.approx(length)


@given(
    fixed=st.floats(0, 0.01),
    each=st.floats(1e-6, 1e-4),
    attention=st.floats(0, 1e-8),
    rows=st.integers(0, 50),
    bound=st.floats(0.001, 0.2),
)
def test_prompt_room_is_the_largest_that_fits(
    fixed: float, each: float, attention: float, rows: int, bound: float
) -> None:
    perf = GeneralModel(Coefficients(fixed, each, each, attention, 0, 1e-8), correct=False)
    load = Load(decode=rows, longest=100 * (rows > 0), context=100 * rows)
    room = prompt_room(perf, load, 4096, bound)
    if room > 0:
        assert perf.step_time(load.add_chunk(room, 0)) <= bound
    if 0 <= room < 4096:
        assert perf.step_time(load.add_chunk(room + 1, 0)) > bound
    assert (room < 0) == (perf.step_time(load) > bound)


FLAT = Coefficients(fixed=20e-3, prefill=1e-4, decode=1e-4, quadratic=0, longest=0, context=0, draft=2e-3)


def supply(tpot: Sequence[float], draft: int, acceptance: float = 0.7, margin: float = 0.0) -> PrefillSupply:
    terms = StepCosts(GeneralModel(FLAT, correct=False), 100_000, 10.0, acceptance, draft, margin, caution=0.0)
    return PrefillSupply(terms, tpot, Load(decode=1, longest=1, context=1), 1, 1.0)


def test_the_best_length_by_hand() -> None:
    """Choose the draft length with the highest prompt rate for ten rows of 50 ms.

    Without drafts, a step of 50 ms leaves 300 tokens less 10: 5,800/s. Verifying k tokens lasts
    50·Acc(k) ms and costs 2 ms a drafted token: 6,750/s at 2, 7,200/s at 3, and more at 4.
    """
    plain = supply([0.05], 0).pace([10])
    assert (plain.seconds, plain.lengths) == (0.05, (1,)) and plain.rate == pytest.approx(5800, abs=25)
    rates = []
    for length in (1, 2, 3, 4):
        seconds = 0.05 * accepted(0.7, length)
        rates.append(((seconds - 20e-3 - 2e-3 * (length - 1)) / 1e-4 - 10 * length) / seconds)
    best = supply([0.05], 3).pace([10])
    assert best.lengths == (1 + int(np.argmax(rates)),) and best.rate == pytest.approx(max(rates), rel=2e-3)
    assert best.seconds == pytest.approx(0.05 * accepted(0.7, best.lengths[0]))


def test_the_looser_tier_drafts_the_shortest_sufficient_length() -> None:
    """50 and 100 ms: if the tighter tier drafts 4 tokens (127 ms), the looser needs Acc >= 1.27, two tokens."""
    pace = supply([0.05, 0.1], 3).pace([10, 10])
    assert pace.lengths[0] > pace.lengths[1] >= 1
    for tpot, length in zip((0.05, 0.1), pace.lengths, strict=True):
        assert tpot * accepted(0.7, length) >= pace.seconds - 1e-12
        assert length == 1 or tpot * accepted(0.7, length - 1) < pace.seconds


@given(
    tpot=st.lists(st.floats(0.01, 0.2), min_size=1, max_size=3, unique=True).map(sorted),
    counts=st.lists(st.integers(0, 60), min_size=3, max_size=3),
    draft=st.integers(0, 4),
    acceptance=st.floats(0, 0.95),
)
def test_more_rows_never_leave_more_prompt_tokens(
    tpot: list[float], counts: list[int], draft: int, acceptance: float
) -> None:
    made = supply(tpot, draft, acceptance)
    now = np.array(counts[: len(tpot)], dtype=float)
    if not now.any():
        return
    more = now[None, :] + np.eye(len(tpot))
    for row in more:
        assert float(made.rate(row[None, :])[0]) <= float(made.rate(now[None, :])[0]) + 25 / tpot[0]
    assert made.pace([int(one) for one in now]).rate == pytest.approx(float(made.rate(now[None, :])[0]))


# ---- drafts through the scheduler
# ----------------------------------------------------------------------------------


class Drafting:
    """First come, first served, with `length` drafted tokens per request and step."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._asked = 0
        self.acceptance = 0.0

    def decide(self, view: View) -> Decision:
        self.acceptance = view.acceptance
        grants = []
        for one in view.decode:
            self._asked += 1
            grants.append(Grant(one.id, 1, self._lengths[self._asked % len(self._lengths)]))
        return Decision((*grants, *(Grant(one.id, one.remaining) for one in view.prefill)))


@given(
    jobs=st.lists(JOB, min_size=1, max_size=7),
    roles=st.sampled_from([(Role.MIXED,), (Role.PREFILL, Role.DECODE)]),
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    acceptance=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    draft=st.integers(0, 5),
    pages=st.integers(11, 18),
    tokens=st.integers(1, 16),
    lead=st.sampled_from([0.0, 4e-4, 1.0]),
)
@settings(max_examples=examples(120), deadline=None)
def test_drafting_loses_and_invents_no_token(  # type: ignore[no-untyped-def]
    jobs, roles, lengths, acceptance, draft, pages, tokens, lead
) -> None:
    """Combine drafts with page pressure, drops, resumption, steps planned ahead and cancellations."""
    outcome = simulate(
        jobs,
        roles,
        policy=lambda: Drafting(lengths),
        pages=pages,
        rows=4,
        tokens=tokens,
        draft=draft,
        acceptance=acceptance,
        lead=lead,
    )
    check(outcome, jobs, draft, 4)


@given(jobs=st.lists(JOB, min_size=1, max_size=5), fail=st.integers(3, 7), acceptance=st.sampled_from([0.3, 1.0]))
@settings(max_examples=examples(40), deadline=None)
def test_a_step_that_raises_while_it_verifies_costs_no_token(  # type: ignore[no-untyped-def]
    jobs, fail, acceptance
) -> None:
    shape = {"pages": 16, "rows": 4, "tokens": 16, "draft": 3, "acceptance": acceptance}
    check_told(simulate(jobs, policy=lambda: Drafting([3]), fails=every(fail), **shape))


@pytest.mark.parametrize("truth", [0.2, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("output", [8, 200])
def test_measured_acceptance_converges(truth: float, output: int) -> None:
    """This holds for short answers too: a draft cut by the end of an answer says nothing of the tokens cut off."""
    policies: list[Drafting] = []

    def policy() -> Drafting:
        policies.append(Drafting([3]))
        return policies[-1]

    jobs = [Job(range(100 * one, 100 * one + 5), output, one * 0.01) for one in range(4000 // output)]
    simulate(jobs, policy=policy, draft=3, acceptance=truth, pages=4000)
    assert policies[0].acceptance == pytest.approx(truth, abs=0.06)


def test_the_estimate_counts_only_verified_drafts() -> None:
    """A draft of three with one right token is a success and a failure; a draft cut short adds no failure."""
    drafts = Drafts(prior=0.5, weight=2.0)
    drafts.count(3, 1)
    assert drafts.acceptance == pytest.approx((0.998 * 1 + 1) / (0.998 * 2 + 2))
    cut = Drafts(prior=0.5, weight=2.0)
    cut.count(3, 1, cut=True)
    assert cut.acceptance > drafts.acceptance


def test_the_deadline_counts_only_accepted_tokens() -> None:
    """A wrong draft of three gains one token, so the next is due one TPOT later, not four."""
    deadlines: list[tuple[float, float]] = []

    class Watching(Drafting):
        def decide(self, view: View) -> Decision:
            for one in view.decode:
                assert one.first_token_at is not None
                deadlines.append((one.deadline - one.first_token_at, one.generated * one.slo.tpot))
            return super().decide(view)

    simulate([Job(range(10), 12)], policy=lambda: Watching([3]), draft=3, acceptance=0.4)
    assert len(deadlines) > 5 and all(due == pytest.approx(granted) for due, granted in deadlines)


# ---- best effort gives way ---------------------------------------------------------------------------------------


def test_requests_with_objectives_take_pages_of_best_effort_which_still_finishes() -> None:
    jobs = [
        Job(range(16), 30, 0.0, tier=BEST_EFFORT),
        Job(range(100, 116), 30, 0.001, tier=BEST_EFFORT),
        Job(range(200, 224), 12, 0.010, tier=STANDARD),
    ]
    outcome = simulate(jobs, policy="distserve", pages=14, rows=4, tokens=64)
    first, second, standard = outcome.requests
    assert first.drops + second.drops >= 1 and standard.drops == 0
    assert second.drops >= first.drops, "the newest best-effort request is dropped first"
    for request, job in zip(outcome.requests, jobs, strict=True):
        assert (request.finish_reason, len(request.output)) == ("stop", job.output)
        assert request.state is State.FINISHED
    assert standard.finished_at is not None and second.finished_at is not None
    assert standard.finished_at < second.finished_at


def test_best_effort_gives_its_slot_to_a_prompt_computed_elsewhere() -> None:
    """On a decode instance with one slot, best effort used to lose it and get it back at every step without a token."""
    jobs = [Job(range(12), 40, tier=BEST_EFFORT), Job(range(100, 112), 5, 0.01)]
    outcome = simulate(jobs, (Role.PREFILL, Role.DECODE), pages=16, rows=1, tokens=11)
    first, second = outcome.requests
    assert (len(first.output), len(second.output)) == (40, 5) and second.drops == 0
    assert first.drops == 1 and first.finished_at > second.finished_at  # type: ignore[operator]
