"""FlowPrefill's decisions on small views, and exact times of a head-of-line blocking case."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.policy import Decision, Task, View
from jaxserve.sched.api.request import BEST_EFFORT, Request, State
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.policies.flowprefill import FlowPrefill
from tests.support.sched.harness import Job, simulate
from tests.support.sched.views import PERF, prompt, view

K = 1024


def due(id: int, length: int, at: float, arrival: float = 0.0, tier: str = "standard") -> Request:
    """Return a prompt with a first-token deadline; 1,000 tokens take a second and each step 10 ms."""
    return prompt(id, length, arrival, SLO(ttft=at - arrival), tier=tier)


def task(*requests: Request, seconds: float, step: int = 7) -> Task:
    """Return a step that computes all remaining tokens of its requests."""
    for one in requests:
        one.state, one.computed, one.pending = State.RUNNING, one.prompt_length, 1
    return Task(step, requests, seconds)


def ask(at: View, **options: Any) -> Decision:
    return FlowPrefill(**options).decide(at)


def together(decision: Decision) -> list[int]:
    return [grant.request for grant in decision.grants[: decision.prompts]]


# Priorities


def test_preempts_for_a_prompt_with_an_earlier_deadline_that_it_can_meet() -> None:
    running = task(due(0, 9000, 20.0), seconds=5.0)
    assert ask(view([due(1, 100, 3.0)], [], running=running)).preempt
    assert not ask(view([due(1, 100, 21.0)], [], running=running)).preempt  # due later
    assert not ask(view([due(1, 4000, 3.0)], [], running=running)).preempt  # late in any case
    assert not ask(view([due(1, 100, 3.0)], [], running=running, free_pages=6)).preempt  # 100 tokens need 7 pages
    assert not ask(view([due(1, 100, 3.0)], [], running=running), preempt=False).preempt
    assert not ask(view([due(1, 100, 3.0, tier=BEST_EFFORT)], [], running=running)).preempt


def test_the_suspended_step_with_the_earliest_deadline_resumes_and_hopeless_ones_last() -> None:
    steps = (
        task(due(0, 9000, 20.0), seconds=5.0, step=3),
        task(due(1, 900, 9.0), seconds=0.5, step=5),
        Task(2, (), 0.1),
    )
    assert ask(view([], [], suspended=steps)).resume == 5
    assert ask(view([], [], suspended=(steps[0], steps[2]))).resume == 3
    assert ask(view([due(4, 100, 1.0, tier=BEST_EFFORT)], [], suspended=steps[2:])).resume is None
    assert ask(view([], [], suspended=steps[2:])).resume == 2


def test_an_aged_long_prompt_resumes_in_its_share_of_the_time_and_is_not_preempted() -> None:
    long, short = due(0, 70_000, 5.0), due(1, 100, 60.0)
    paused = task(long, seconds=40.0)
    for start, turn in ((0.5, True), (1.5, False), (10.5, True), (19.0, False)):
        at = view([short], [], suspended=(paused,), start=start)
        assert (ask(at, ageing=0.1).resume == 7) == turn
        at = view([short], [], running=paused, start=start)
        assert ask(at, ageing=0.1).preempt != turn
        assert ask(at).preempt


def test_the_numerator_selects_one_of_the_papers_three_orders() -> None:
    """At 4 s prompt 0 is late, prompt 1 will be, and prompt 2 can be on time."""
    requests = [due(0, 100, 3.0), due(1, 9000, 5.0), due(2, 2000, 30.0)]
    at = view(requests, [], start=4.0)
    assert [together(ask(at, order=name, batch=0)) for name in ("edf", "deadline_edf", "sedf")] == [[0], [1], [2]]


# Batching


def test_short_prompts_share_a_step_below_the_budget() -> None:
    requests = [due(i, 300, 9.0 + i) for i in range(5)]
    assert together(ask(view(requests, []))) == [0, 1, 2]
    assert together(ask(view(requests, []), batch=900)) == [0, 1]  # n < G, as printed
    assert together(ask(view(requests, []), batch=0)) == [0]


def test_no_prompt_outside_a_batch_becomes_late_by_it() -> None:
    """Behind prompt 0 alone (0.31 s), prompt 2 ends at 2.32 s; behind 0 and 1 (0.61 s) at 2.62 s, too late."""
    requests = [due(0, 300, 2.0), due(1, 300, 2.1), due(2, 2000, 2.5)]
    assert together(ask(view(requests, []))) == [0]
    assert together(ask(view(requests, []), literal=True)) == [0, 1]
    paused = task(due(3, 2000, 2.5), seconds=2.0)
    assert together(ask(view(requests[:2], [], suspended=(paused,)))) == [0]
    assert together(ask(view([*requests[:2], due(2, 2000, 2.7)], []))) == [0, 1]


@given(
    rows=st.lists(st.tuples(st.integers(1, 3000), st.floats(0.1, 6.0)), min_size=1, max_size=12),
    batch=st.sampled_from([0, 500, 1024, 8192]),
)
def test_a_batch_breaks_no_deadline(rows: list[tuple[int, float]], batch: int) -> None:
    requests = [due(i, length, at) for i, (length, at) in enumerate(rows)]
    chosen = together(ask(view(requests, []), batch=batch))
    head, load = chosen[0], Load()
    for id in chosen:
        load = load.add_chunk(rows[id][0], 0)
    alone, joint = PERF.step_time(Load().add_chunk(rows[head][0], 0)), PERF.step_time(load)
    assert load.prefill < batch or len(chosen) == 1
    for id, (length, at) in enumerate(rows):
        own = 0.0 if id in chosen else PERF.step_time(Load().add_chunk(length, 0))
        if id not in chosen and alone + own <= at and own <= at:
            assert joint + own <= at
        if id in chosen and len(chosen) > 1:
            assert joint < at


# Head-of-line blocking: one prompt of 128K tokens, then ten of 8K, at 1 ms a token

SIMPLE = Coefficients(fixed=0.0, prefill=1e-3, decode=0.0, quadratic=0.0, longest=0.0, context=0.0)
LONG, SHORT = 128 * K / 1000, 8 * K / 1000
JOBS = [
    Job(range(128 * K), 1, 0.0, SLO(ttft=400.0)),
    *(Job(range(8 * K), 1, 1.0, SLO(ttft=100.0)) for _ in range(10)),
]


def times(policy: str, tokens: int, **shape: Any) -> list[float]:
    fields: dict[str, Any] = {
        "pages": 4096,
        "page_size": 64,
        "rows": 64,
        "prefix_caching": False,
        "coefficients": SIMPLE,
    }
    outcome = simulate(JOBS, policy=policy, tokens=tokens, **fields, **shape)
    return [request.token_times[0] - request.arrival for request in outcome.requests]


@pytest.mark.parametrize(
    ("policy", "tokens", "segments", "stopped"),
    [
        pytest.param("distserve", 128 * K, 1, LONG, id="fcfs, whole prompt"),
        pytest.param("distserve", 8 * K, 1, LONG, id="fcfs, chunk"),
        pytest.param("flowprefill", 128 * K, 1, LONG, id="whole prompt"),
        pytest.param("flowprefill", 8 * K, 1, SHORT, id="chunk"),
        pytest.param("flowprefill", 128 * K, 64, 2.048, id="layer of a prompt"),
        pytest.param("flowprefill", 128 * K, 320, 1.2288, id="op of a prompt"),
        pytest.param("flowprefill", 8 * K, 64, 1.024, id="layer of a chunk"),
        pytest.param("flowprefill", 8 * K, 320, 1.024, id="op of a chunk"),
    ],
)
def test_short_prompts_wait_for_the_long_one_or_for_the_next_boundary_only(
    policy: str, tokens: int, segments: int, stopped: float
) -> None:
    """The first short prompt starts at the boundary; the long one ends after all of them, with no work lost."""
    ends = times(policy, tokens, preemptible=segments > 1, segments=segments, prompts=1)
    shorts = [stopped + SHORT * (i + 1) - 1.0 for i in range(10)]
    long = LONG if stopped == LONG else LONG + 10 * SHORT
    assert ends == pytest.approx([long, *shorts], rel=1e-9)
