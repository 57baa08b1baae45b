"""Requests in rounds, requests that think before they answer, and requests without objectives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.policy import Decision, Grant, View
from jaxserve.sched.api.slo import SLO, THINKING
from jaxserve.sched.sim import Arrival, Options, simulate
from jaxserve.sched.sim.executor import END_THINKING
from jaxserve.sched.sim.record import Recorder
from tests.support.examples import examples
from tests.support.sched.presets import TINY

QUIET = replace(TINY, noise=0.0)


def test_a_round_arrives_after_the_last_token_of_the_previous_one() -> None:
    chain = [
        Arrival(0.5, 20, 4, hash_ids=(1 << 33,), block=1 << 24),
        Arrival(0.5, 34, 3, hash_ids=(1 << 33,), block=1 << 24, after=0, delay=2.0),
        Arrival(0.5, 47, 2, hash_ids=(1 << 33,), block=1 << 24, after=1, delay=0.25),
        Arrival(0.6, 10, 2),
    ]
    report = simulate(chain, "distserve", "2x1", QUIET, options=Options(routing_delay=0.01))
    first, second, third, _ = sorted(report.measured)
    assert second.arrival == pytest.approx(first.ended + 2.0) and third.arrival == pytest.approx(second.ended + 0.25)
    assert report.summary.reasons == {"stop": 4}
    assert report.counters.prefix_hits > 0  # the previous round is in the cache


def test_rounds_after_a_refused_one_never_arrive() -> None:
    chain = [Arrival(0.0, 5000, 4), Arrival(0.0, 10, 1, after=0), Arrival(0.0, 10, 1, after=1), Arrival(0.0, 10, 1)]
    recorder = Recorder()
    report = simulate(chain, "distserve", "1x1", QUIET, recorder=recorder)
    assert report.summary.reasons == {"rejected": 3, "stop": 1}
    assert [one.attained for one in sorted(report.measured)] == [False, False, False, True]
    assert recorder.requests[2].error == "the round before it did not finish"


class Drafts:
    """A policy that runs everything at once and drafts as much as rows may."""

    def decide(self, view: View) -> Decision:
        rows = tuple(Grant(one.id, one.remaining, view.limits.draft) for one in view.decode)
        return Decision((*rows, *(Grant(one.id, one.remaining) for one in view.prefill)))


@settings(deadline=None, max_examples=examples(40))
@given(thought=st.integers(1, 12), answer=st.integers(0, 12), draft=st.integers(0, 3), seed=st.integers(0, 5))
def test_thinking_ends_at_its_token_and_the_answer_has_its_own_objective(
    thought: int, answer: int, draft: int, seed: int
) -> None:
    slo = SLO(1.0, 0.05, stages=((THINKING, 0.02),))
    arrivals = [Arrival(0.0, 10, thought + answer, slo, thinking_tokens=thought)]
    recorder = Recorder()
    report = simulate(
        arrivals, Drafts, "2x1", QUIET, seed, recorder=recorder, options=Options(draft=draft, acceptance=0.5)
    )
    request = recorder.requests[0]
    assert (report.counters.drafted > 0) == (draft > 0 and thought + answer > 1)
    assert len(request.output) == thought + answer and report.summary.reasons == {"stop": 1}
    ends = [place for place, token in enumerate(request.output, 1) if token == END_THINKING]
    assert ends == ([thought] if answer else [])
    assert request.stage == ("answer" if answer else THINKING)
