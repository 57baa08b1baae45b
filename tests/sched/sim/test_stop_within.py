"""A running prefill that is asked to stop does so within the bound that an operator sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.preemption import LEAD
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.sim import Arrival, Latency, Options, simulate
from tests.support.examples import examples

TRUTH = Coefficients(fixed=2e-3, prefill=4e-5, decode=1e-6, quadratic=4e-9, longest=1e-8, context=1e-8)
LATENCY = Latency("test", kv_bytes_per_token=1, kv_tokens=1 << 20, coefficients=TRUTH, layers=16)


def waits(policy: str, bound: float | None, boundary: str, lengths: list[int], mesh: str) -> tuple[list[float], int]:
    """Return the seconds from each request to stop a step until it stopped, and the number of steps."""
    found: list[float] = []

    def watched(name: str, *_: object) -> Callable[..., None]:
        asked: list[float] = []

        def log(kind: str, **fields: Any) -> None:
            if kind == "interrupts":
                asked.append(fields["now"])
            elif kind == "suspend":
                found.append(fields["result"].at - asked[-1])

        return log

    long, short = SLO(ttft=4.0, tpot=1.0), SLO(ttft=0.05, tpot=1.0)
    arrivals = [Arrival(0.1 * i, length, 2, short if length < 500 else long) for i, length in enumerate(lengths)]
    options = Options(perf="exact", boundary=boundary, stop_within=bound, noise=0.0)
    report = simulate(arrivals, policy, mesh, LATENCY, options=options, logs=watched)
    assert report.summary.reasons == {"stop": len(arrivals)}
    return found, report.counters.steps


@given(
    policy=st.sampled_from(["flowprefill", "unified"]),
    bound=st.floats(0.004, 0.05),
    boundary=st.sampled_from(["op", "layer", "layers:4"]),
    lengths=st.lists(st.one_of(st.integers(8, 400), st.integers(2000, 30000)), min_size=4, max_size=30),
    mesh=st.sampled_from(["1x1", "2x1"]),
)
@settings(max_examples=examples(60))
def test_a_stop_waits_no_longer_than_the_bound(
    policy: str, bound: float, boundary: str, lengths: list[int], mesh: str
) -> None:
    found, _ = waits(policy, bound, boundary, lengths, mesh)
    assert max(found, default=0.0) <= bound + 1e-9


def test_the_bound_is_what_shortens_the_wait_and_cuts_the_steps() -> None:
    lengths = [20000, 100] * 8
    free, few = waits("flowprefill", None, "layer", lengths, "1x1")
    bounded, many = waits("flowprefill", 0.006, "layer", lengths, "1x1")
    assert max(bounded) <= 0.006 < max(free)
    assert many > few


def test_a_bound_that_no_stop_can_keep_is_refused() -> None:
    with pytest.raises(InvalidValue, match=rf"stop_within={LEAD} must be more than {LEAD} s"):
        replace(Options(), stop_within=LEAD)
