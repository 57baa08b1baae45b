"""Profiling before serving: every kind of step, within the limits and within the time, also on slow devices."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.plan import StepPlan, StepResult, Suspended
from jaxserve.sched.api.policy import Limits
from jaxserve.sched.perf.buckets import NONE, Buckets
from jaxserve.sched.perf.fit import kind
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.perf.profile import FIRST, Point, measure, probes, spans
from jaxserve.sched.sim import clock
from jaxserve.sched.sim.executor import Device, SimExecutor

ENGINE = Buckets((1, 4, 8, 16, 32, 64), (64, 128, 512))
LIMITS = Limits(512, 64, 8192, 16)


@given(
    rows=st.integers(1, 300),
    tokens=st.integers(1, 9000),
    pages=st.integers(4, 4000),
    page_size=st.sampled_from([1, 16, 64]),
    length=st.integers(2, 100_000),
    draft=st.integers(0, 4),
    padded=st.booleans(),
)
def test_probes_are_valid_steps(
    rows: int, tokens: int, pages: int, page_size: int, length: int, draft: int, padded: bool
) -> None:
    limits = Limits(max(tokens, rows), rows, pages, page_size, draft=draft)
    made = probes(limits, length, ENGINE if padded else NONE)
    assert made and len(set(made)) == len(made)
    for probe in made:
        assert 1 <= len(probe.rows) <= limits.rows and probe.load.tokens <= limits.tokens
        assert all(row.start >= 0 and row.length >= 1 for row in probe.rows)
        assert all(row.start + row.length <= max(length, 2) + draft for row in probe.rows)
        held = [page for span in spans(probe, limits) for page in span.new_pages]
        assert len(set(held)) == len(held) and max(held) < limits.pages, "two requests share a page"


@pytest.mark.parametrize("buckets", [NONE, ENGINE], ids=["plain", "padded"])
def test_the_first_probes_are_the_smallest_of_every_kind(buckets: Buckets) -> None:
    made = probes(LIMITS, 2048, buckets)
    assert {kind(probe.load) for probe in made[:3]} == {"decode", "prefill", "mixed"}
    assert all(probe.load.tokens <= 64 for probe in made[:3])
    assert {probe.load.decode for probe in made if kind(probe.load) == "decode"} >= set(buckets.decode)
    longest = max(probe.load.longest for probe in made)
    assert longest > 1900, "no long contexts are measured"


def profile(truth: Coefficients, seconds: float, limits: Limits = LIMITS) -> tuple[list[Point], float]:
    """Profile in virtual time; return the points and the time it took."""

    async def run() -> tuple[list[Point], float]:
        outputs: defaultdict[int, int] = defaultdict(lambda: 1 << 30)
        executor = SimExecutor(truth, Device(limits.pages, limits.page_size), outputs, clock.loop())
        return await measure(executor, limits, 2048, ENGINE, seconds), executor.now()

    return clock.run(run())


def test_a_fast_device_is_profiled_completely_and_exactly() -> None:
    truth = Coefficients(1e-3, 1e-5, 1e-5, 1e-9, 1e-7, 1e-8)
    points, took = profile(truth, 10.0)
    assert [load for load, _ in points] == [probe.load for probe in probes(LIMITS, 2048, ENGINE)]
    assert took < 10.0
    for load, seconds in points:
        assert seconds == pytest.approx(truth.step_time(load))


@pytest.mark.parametrize("chunk", [0.5, 2.0, 20.0])
def test_a_device_with_slow_chunks_still_gets_decode_and_mixed_points(chunk: float) -> None:
    truth = Coefficients(0.02 * chunk, chunk / 512, 2e-3 * chunk, 0.0, 1e-6, 1e-7)
    points, took = profile(truth, 10.0)
    kinds = {kind(load) for load, _ in points}
    assert kinds == {"decode", "prefill", "mixed"}
    first = sum(truth.step_time(probe.load) for probe in probes(LIMITS, 2048, ENGINE)[:FIRST])
    assert took <= 10.0 + 2 * first
    if chunk == 0.5:
        assert len(points) > 15 and any(load.prefill == 512 for load, _ in points)


def test_the_first_cold_step_of_a_program_is_not_a_point() -> None:
    truth = Coefficients(0.02, 1e-4, 1e-3, 0.0, 0.0, 0.0)

    class Cold(SimExecutor):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.warm: set[tuple[bool, int]] = set()

        async def submit(self, plan: StepPlan) -> StepResult | Suspended:
            result = await super().submit(plan)
            assert isinstance(result, StepResult)
            program = any(span.length > 1 for span in plan.spans), sum(span.length for span in plan.spans)
            late = 0.2 * (program not in self.warm)
            self.warm.add(program)
            return result._replace(finished=result.finished + late)

    async def run() -> list[Point]:
        executor = Cold(truth, Device(LIMITS.pages, LIMITS.page_size), defaultdict(lambda: 1 << 30), clock.loop())
        return await measure(executor, LIMITS, 2048, ENGINE, 10.0)

    assert all(seconds == pytest.approx(truth.step_time(load)) for load, seconds in clock.run(run()))


def test_steps_with_drafts_are_measured_if_drafts_are_enabled() -> None:
    truth = Coefficients(1e-3, 1e-5, 1e-5, 1e-9, 1e-7, 1e-8, draft=1e-3)
    points, _ = profile(truth, 10.0, Limits(512, 64, 8192, 16, draft=4))
    drafted = [load for load, _ in points if load.drafts]
    assert {load.drafts for load in drafted} == {1, 2, 4}
    assert all(load == Load(load.decode, 0) or load.prefill == 0 for load in drafted)
