"""The queue timeout bounds the wait for a first token, and ends only requests that wait."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.recorded.record import Recorder
from jaxserve.sched.sim import Latency, Mesh, Options, Report, simulate
from jaxserve.sched.sim.workload import Lengths, Mix, Share, Workload
from tests.support.examples import examples

ANSWERS = Lengths("uniform", low=1, high=20)
CHAT = Workload("chat", Lengths("uniform", low=100, high=900), ANSWERS, ttft=0.5, tpot=0.1, request_class="chat")
LONG = Workload("long", Lengths("uniform", low=5_000, high=20_000), ANSWERS, ttft=4.0, tpot=0.1, request_class="long")
MIX = Mix("chat and long", (Share(4, CHAT), Share(1, LONG)))
TIMES = Coefficients(fixed=5e-3, prefill=1e-4, decode=2e-4, quadratic=0.0, longest=0.0, context=1e-7)
LATENCY = Latency("test", kv_bytes_per_token=1, kv_tokens=400_000, coefficients=TIMES, layers=8)


def run(timeout: float, policy: str = "unified", mesh: str = "1x1", seed: int = 0, qps: float = 8.0) -> Report:
    options = Options(queue_timeout=timeout)
    return simulate(MIX, policy, Mesh.parse(mesh), LATENCY, seed, qps=qps, num_requests=150, options=options)


def test_it_bounds_the_wait_of_late_prompts_and_costs_no_objective() -> None:
    endless, bounded = run(0.0).measured, run(8.0).measured
    assert max(one.ttft for one in endless) > 20.0, "no overload"
    served = [one.ttft for one in bounded if one.reason != "expired"]
    assert len(served) < len(endless) and max(served) < 10.0
    assert [one.attained for one in bounded] == [one.attained for one in endless]
    assert {one.reason for one in endless} == {"stop"}


@given(
    timeout=st.floats(0.2, 20.0),
    policy=st.sampled_from(["unified", "vllm", "sarathi", "distserve", "kairos", "flowprefill"]),
    mesh=st.sampled_from(["1x1", "2x1", "3x1"]),
    seed=st.integers(0, 9),
    qps=st.floats(2.0, 20.0),
)
@settings(max_examples=examples(60), deadline=None)
def test_only_requests_that_wait_are_ended(timeout: float, policy: str, mesh: str, seed: int, qps: float) -> None:
    """The simulation itself checks that no request and no page is lost."""
    recorder = Recorder()
    options = Options(queue_timeout=timeout)
    report = simulate(
        MIX, policy, Mesh.parse(mesh), LATENCY, seed, qps=qps, num_requests=60, options=options, recorder=recorder
    )
    longest = max(one.end - one.start for one in recorder.stretches)
    steps = {(one.start, one.end, span.request) for one in recorder.stretches for span in one.plan.spans}
    for one in report.measured:
        if one.reason == "expired":
            assert one.output == 0 and one.ttft == inf
        elif one.ttft > timeout:  # its prompt was in a step then, or in one that was planned behind a running one
            look = one.arrival + timeout
            assert any(id == one.id and start <= look + 2 * longest and end >= look for start, end, id in steps)


def test_a_timeout_of_zero_ends_nothing() -> None:
    assert not any(one.reason == "expired" for one in run(0.0, qps=20.0).measured)


def test_a_negative_timeout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"queue_timeout=-1.0 must be 0 s or more"):
        Options(queue_timeout=-1.0)
