"""Requests that decode where their prompt was computed because no other instance has a slot: none is lost."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.request import Request, State
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.routing.least_work import LeastWork
from jaxserve.sched.sim import Arrival, Mesh, simulate
from jaxserve.sched.sim.options import Options
from tests.support.examples import examples
from tests.support.sched.cases import ADMISSIONS, JOBS, MESHES, POLICIES, SHAPE
from tests.support.sched.harness import Job
from tests.support.sched.latency import LATENCY
from tests.support.sched.laws import check_laws
from tests.support.sched.recorded import check_replay, recorded
from tests.support.sched.roles import ROLE_CHANGES, SEVERAL, run

D, P = Role.DECODE, Role.PREFILL
SOME = st.integers(1, 3)  # every `SOME`th request decodes in place


def decoding_in_place(some: int = 1) -> object:
    """Return router `least_work` with every `some`th request decoding in place."""

    def decode_in_place(self: LeastWork, request: Request, index: int, fleet: object) -> bool:
        return request.id % some == 0

    return patch.object(LeastWork, "decode_in_place", decode_in_place, create=True)


@settings(max_examples=examples(60))
@given(
    policy=st.sampled_from(POLICIES),
    mesh=st.sampled_from(sorted(SEVERAL)),
    admission=st.sampled_from(ADMISSIONS),
    jobs=JOBS,
    shape=SHAPE,
    some=SOME,
    changes=st.one_of(st.just([]), ROLE_CHANGES),
)
def test_decoding_in_place_loses_nothing(policy, mesh, admission, jobs, shape, some, changes) -> None:  # type: ignore[no-untyped-def]
    with decoding_in_place(some):  # type: ignore[attr-defined]
        check_laws(policy, (mesh, "least_work", admission), jobs, shape, changes=changes)


@settings(max_examples=examples(30))
@given(
    jobs=JOBS,
    mesh=st.sampled_from(["1P1D", "2P2D"]),
    policy=st.sampled_from(["distserve", "kairos", "unified"]),
    first=st.sampled_from(["prefill", "decode"]),
    some=SOME,
)
def test_decoding_in_place_is_journaled(jobs, mesh, policy, first, some) -> None:  # type: ignore[no-untyped-def]
    with decoding_in_place(some):  # type: ignore[attr-defined]
        check_replay(recorded(jobs, MESHES[mesh], policy, pages=24, first_token=first))


def test_a_request_without_a_slot_decodes_in_place_until_one_is_free() -> None:
    """The decode instance has one slot, taken for 30 steps: the second request decodes in place and moves later."""
    jobs = [Job(range(8), 30), Job(range(100, 108), 60)]
    with decoding_in_place():  # type: ignore[attr-defined]
        outcome = run([], jobs, (P, D), rows=1, routing="least_work")
    first, second = outcome.requests
    assert second.token_times[9] < first.token_times[-1], "the request waited for the slot"
    where = [name for name, plan in outcome.plans for span in plan.spans if span.request == 1]
    assert where[1] == "prefill0" and where[-1] == "decode1" and second.drops == 0


def test_a_delayed_first_token_counts_when_its_request_decodes_in_place() -> None:
    """With `--first-token decode`, the token is delivered when it no longer waits for a transfer."""
    jobs = [Job(range(8), 80), Job(range(100, 130), 5)]
    shape = {"first_token": "decode", "rows": 1, "roles": (P, D), "routing": "least_work"}
    held = run([], jobs, **shape)  # type: ignore[arg-type]
    with decoding_in_place():  # type: ignore[attr-defined]
        kept = run([], jobs, **shape)  # type: ignore[arg-type]
    assert held.requests[1].token_times[0] > 0.07 > 0.02 > kept.requests[1].token_times[0]
    assert kept.deltas[1][0].tokens and [r.output for r in held.requests] == [r.output for r in kept.requests]


def test_unified_decodes_in_place_while_slots_are_scarce() -> None:
    """First tokens stay in time although requests arrive faster than slots are freed.

    Eight rows of 400 tokens take 0.9 s, and a request with a prompt of 4 ms arrives every 50 ms:
    from the ninth on, requests waited half a second for a slot. One of them may wait for a decode
    step.
    """
    arrivals = [Arrival(0.05 * one, 20, 400, SLO(ttft=0.0075, tpot=0.008)) for one in range(15)]
    apart, both = (
        simulate(arrivals, "unified", Mesh(2), LATENCY, options=Options(routing=routing, rows=8))
        for routing in ("unified:no-decode-in-place+no-change-roles", "unified")
    )
    waited, waits = (max(one.largest_gap for one in report.measured) for report in (apart, both))
    assert waited > 0.4 and waits < 0.05
    assert apart.summary.ttft_attained == both.summary.ttft_attained == 1.0
    assert both.busy[0] > apart.busy[0] + 0.2


def test_the_longest_row_leaves_first_and_a_waiting_request_decodes_in_place_instead() -> None:
    left, leave = [], Scheduler.leave

    def leaves(self: Scheduler, id: int) -> None:
        kept = {one.id: one.computed for one in self if one.decodes_in_place}
        left.append((kept[id], sorted(kept.values()), any(one.state is State.TRANSFERRING for one in self)))
        leave(self, id)

    arrivals = [Arrival(0.03 * one, 20 + 15 * (one % 3), 200 + 37 * (one % 7), SLO(0.02, 0.02)) for one in range(99)]
    with patch.object(Scheduler, "leave", leaves):
        report = simulate(
            arrivals, "unified", Mesh(2), LATENCY, options=Options(routing="unified:no-change-roles", rows=8)
        )
    assert all(one == kept[-1] for one, kept, _ in left) and report.summary.reasons == {"stop": 99}
    chosen = [waits for _, kept, waits in left if len(kept) > 1]
    assert len(chosen) >= 3 and any(chosen), chosen


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_tokens": 80},  # 10 ms: a later step with such a prompt breaks the TPOT
        {"slo": SLO(ttft=0.0055, tpot=0.008)},  # no time to wait for a step
        {"tier": "best_effort"},
    ],
    ids=str,
)
def test_unified_does_not_decode_in_place_if_that_breaks_objectives(change: dict[str, object]) -> None:
    fields = {"prompt_tokens": 20, "output_tokens": 400, "slo": SLO(ttft=0.0075, tpot=0.008)}
    kept = []
    for some in ({}, change):
        arrivals = [Arrival(time=0.05 * one, **{**fields, **some}) for one in range(15)]  # type: ignore[arg-type]
        with patch.object(
            Scheduler, "decode_in_place", autospec=True, side_effect=Scheduler.decode_in_place
        ) as decided:
            simulate(arrivals, "unified", Mesh(2), LATENCY, options=Options(routing="unified", rows=8))
        kept.append(decided.call_count)
    assert kept[0] > 3 and kept[1] == 0
