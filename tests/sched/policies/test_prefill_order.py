"""Orders of waiting prompts: the first prompt of each order, and properties of all orders."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched import policies
from jaxserve.sched.api.policy import Limits, View
from jaxserve.sched.api.request import BEST_EFFORT, Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.policies.ordered import LONG, PERIOD
from tests.support.sched.harness import Job, simulate
from tests.support.sched.views import begun, order, prompt, view

ORDERS = ("fcfs", "sjf", "edf", "deadline_edf", "sedf", "kairos", "kairos:literal", "kairos:verbatim", "flowprefill")
AGEING = ("sjf", "edf", "deadline_edf", "sedf", "kairos", "kairos:literal", "flowprefill")


def first(name: str, at: View) -> int:
    return policies.make(f"prefill={name},decode=continuous").decide(at).grants[0].request


def due(id: int, length: int, at: float, arrival: float = 0.0) -> Request:
    """Return a prompt with a first-token deadline; 1,000 tokens take a second and each step 10 ms."""
    return prompt(id, length, arrival, SLO(ttft=at - arrival))


def test_s_edf_puts_prompts_that_will_be_late_last_and_counts_only_remaining_work() -> None:
    """At 5 s prompt 2 needs 9 s and has 1.5; prompt 4 has 1,000 of 9,000 tokens left, which fit."""
    requests = [due(0, 10, 3.0), due(2, 9000, 6.5), due(3, 10, 9.0), begun(due(4, 9000, 6.5), 8000)]
    assert order(policies.make("sedf"), view(requests, [], start=5.0)) == [4, 3, 0, 2]


def test_literal_kairos_counts_the_whole_prompt_for_every_chunk_and_overestimates_slack() -> None:
    """Line 22 as published makes mu a hundred times too high for a prompt of 100 chunks of 1,000 tokens.

    Two prompts that will be late then look early, and among early prompts the short one goes first.
    """
    limits = Limits(1000, 256, 10_000, 16)
    literal, verbatim = policies.make("kairos:literal"), policies.make("kairos:verbatim")
    requests = [prompt(0, 9000), prompt(1, 100)]
    for policy in (literal, verbatim):
        for _ in range(100):
            assert order(policy, view([prompt(2, 100_000)], [], limits=limits)) == [2]
    assert order(literal, view(requests, [], limits=limits)) == [0, 1]
    assert order(verbatim, view(requests, [], limits=limits)) == [1, 0]


def test_kairos_can_predict_finish_times_by_the_model() -> None:
    """In chunks of 10 tokens, 4,000 tokens take 8 s; n/mu with the mu of large chunks predicts 4 s."""
    limits = Limits(10, 256, 10_000, 16)
    requests = [due(0, 4000, 7.0), due(1, 5000, 18.5)]
    assert order(policies.make("kairos"), view(requests, [], limits=limits)) == [0, 1]
    assert order(policies.make("kairos:quadratic"), view(requests, [], limits=limits)) == [1, 0]


@pytest.mark.parametrize("name", ORDERS)
def test_best_effort_comes_last_in_every_order(name: str) -> None:
    """A best-effort prompt comes last although it is the shortest, the first, and has the earliest deadline."""
    easy = prompt(0, 10, -5.0, SLO(ttft=6.0), tier=BEST_EFFORT)
    requests = [easy, prompt(1, 5000), prompt(2, 9000, -50.0)]
    granted = order(policies.make(f"prefill={name},decode=continuous"), view(requests, []))
    assert granted[:1] != [0] and 0 not in granted[:2]


@pytest.mark.parametrize("name", AGEING)
def test_the_oldest_long_prompt_has_its_share_of_the_time(name: str) -> None:
    """The oldest long prompt gets the first 2 s of every 10 s, and otherwise waits behind the short ones."""
    requests = [due(0, 500, 60.0), due(1, LONG, 70.0), due(2, LONG, 70.0), due(3, 500, 60.0)]
    best_effort = prompt(4, LONG, -1.0, tier=BEST_EFFORT)
    for start in np.arange(0.0, 3 * PERIOD, 0.5).tolist():
        at = view([*requests, best_effort], [], start=start, limits=Limits(8192, 256, 100_000, 16))
        colon = "+" if ":" in name else ":"
        assert (first(f"{name}{colon}ageing=0.2", at) == 1) == (start % PERIOD < 2.0)
        assert first(name, at) != 1


@pytest.mark.parametrize("name", ["sjf", "edf", "deadline_edf", "sedf", "kairos"])
def test_a_chunk_holds_one_prompt_or_several(name: str) -> None:
    jobs = [Job(range(1000 * i, 1000 * i + 10), 1) for i in range(4)]
    packed = simulate(jobs, policy=name, tokens=32)
    alone = simulate(jobs, policy=f"{name}:no-pack", tokens=32)
    assert [len(plan.spans) for _, plan in packed.plans] == [4, 1]
    assert [len(plan.spans) for _, plan in alone.plans] == [1] * 4


@given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=12),
    name=st.sampled_from(ORDERS[:-1]),
    start=st.floats(0, 30),
)
def test_every_order_contains_each_prompt_once(lengths: list[int], name: str, start: float) -> None:
    requests = [prompt(i, length, i * 0.7 % 3, SLO(ttft=1 + i % 5)) for i, length in enumerate(lengths)]
    assert sorted(order(policies.make(f"prefill={name},decode=continuous"), view(requests, [], start=start))) == list(
        range(len(lengths))
    )
