"""Prompts beside running decodes: prefill steps stop for the next token, or mixed steps keep the tightest TPOT."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Any

import pytest

from jaxserve.sched import policies
from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.policy import Decision, Limits, Role, View
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import SLO
from tests.support.sched.harness import COEFFICIENTS, Job, Outcome, simulate
from tests.support.sched.views import decoding, prompt, view

LONG = 1600  # tokens, 94 ms
T_LONG = COEFFICIENTS.step_time(Load().add_chunk(LONG, 0))
TPOT = 0.01
SHAPE: dict[str, Any] = {
    "policy": "flowprefill", "preemptible": True, "segments": 40, "pages": 2000, "tokens": 2000,
}  # fmt: skip
HALVES = ("deadline_edf", "distserve", "edf", "flowprefill:no-preempt", "kairos", "sedf", "sjf")


def talk(output: int = 60, tpot: float = TPOT, arrival: float = 0.0) -> Job:
    """Return a request with a short prompt, a long answer, and a bound on every gap between tokens."""
    return Job(range(90_000, 90_020), output, arrival, SLO(ttft=8.0, tpot=tpot, tbt=tpot))


def document(arrival: float, at: int = 0, ttft: float = 8.0) -> Job:
    return Job(range(at, at + LONG), 2, arrival, SLO(ttft=ttft, tpot=TPOT))


def gaps(request: Request) -> list[float]:
    return [after - before for before, after in pairwise(request.token_times)]


def kinds(outcome: Outcome) -> set[str]:
    """Return the kinds of steps with prompts while a row decoded: `prompts` alone, or `mixed`."""
    return {
        "mixed" if any(span.length == 1 for span in plan.spans) else "prompts"
        for _, plan in outcome.plans
        if any(span.length > 1 for span in plan.spans)
    }


def test_a_long_prompt_is_stopped_for_the_next_token_of_a_running_decode() -> None:
    outcome = simulate([talk(), document(0.02)], **SHAPE)
    first, second = outcome.requests
    counters = outcome.counters["mixed0"]
    assert counters.suspended == counters.resumed > 5
    assert kinds(outcome) == {"prompts"}
    assert all(gap <= TPOT + 1e-9 for gap in gaps(first)), "a token was late"
    assert [len(one.output) for one in outcome.requests] == [60, 2]
    taken = second.token_times[0] - second.arrival
    assert T_LONG < taken < 2 * T_LONG, "the prompt did not get most of the time"


@pytest.mark.parametrize("policy", HALVES)
def test_every_composed_policy_bounds_mixed_steps_by_the_tightest_tpot(policy: str) -> None:
    """With an exact model, each mixed step takes at most the tightest TPOT."""
    jobs = [talk(200), talk(200, tpot=0.02, arrival=0.01), document(0.05), document(0.06, at=5000)]
    outcome = simulate(jobs, **{**SHAPE, "policy": policy})
    assert outcome.counters["mixed0"].suspended == 0
    assert "mixed" in kinds(outcome)
    assert all(gap <= TPOT + 1e-9 for gap in gaps(outcome.requests[0]))
    assert [len(one.output) for one in outcome.requests] == [200, 200, 2, 2]


def test_decodes_without_an_objective_take_every_other_step() -> None:
    jobs = [
        Job(range(90_000, 90_020), 60, 0.0, SLO(ttft=inf, tpot=inf)),
        document(0.01),
        document(0.01, at=5000),
    ]
    outcome = simulate(jobs, **SHAPE)
    spans = [max(span.length for span in plan.spans) for _, plan in outcome.plans]
    long = [place for place, most in enumerate(spans) if most > 100]
    assert len(long) == 2 and long[1] == long[0] + 2, "no decode step between two prefill steps"


# Single decisions


def colocated(prefill: list[Request], decode: list[Request], **more: object) -> View:
    limits = Limits(8192, 256, 1000, 16, preemptible=True, stopping=0.05)
    return view(prefill, decode, **{"role": Role.MIXED, "limits": limits, **more})


def decide(at: View) -> Decision:
    return policies.make("flowprefill").decide(at)


def test_the_first_prompt_is_chunked_so_that_its_step_can_stop_in_time() -> None:
    """A tenth of the step must fit in a quarter of 50 ms, so the step takes 125 ms, 10 of them fixed."""
    limits = Limits(8192, 256, 1000, 16, preemptible=True, stopping=0.1)
    decision = decide(colocated([prompt(0, 5000)], [decoding(1, 100, due=0.3)], limits=limits))
    assert decision.grants[0].request == 0 and 64 <= decision.grants[0].tokens <= 115


# FlowPrefill, Figure 16
