"""Laws of the simulated devices: model times, ordered steps, hidden output lengths, and serial links."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.plan import Begin, Span, StepPlan, StepResult, Suspended
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.sim import clock
from jaxserve.sched.sim.executor import EOS, FILLER, Device, SimExecutor

MODEL = Coefficients(fixed=1.0, prefill=0.1, decode=0.01, quadratic=0.001, longest=0.0, context=0.002)
DEVICE = Device(pages=100, page_size=4, kv_bytes_per_token=100, bandwidth=400.0, latency=0.5)


def begin(prompt: int) -> Begin:
    return Begin(SamplingParams(), 0, (), (), prompt, (EOS,))


def prefill(request: int, slot: int, start: int, length: int, prompt: int, samples: bool) -> Span:
    return Span(request, slot, start, length, (0,), tuple(range(length)), 0, samples, begin(prompt))


def make(outputs: dict[int, int], device: Device = DEVICE, **kwargs: Any) -> SimExecutor:
    return SimExecutor(MODEL, device, outputs, clock.loop(), **kwargs)


def test_a_step_takes_the_time_that_the_model_predicts() -> None:
    async def main() -> None:
        executor = make({1: 5, 2: 5})
        first = await executor.submit(StepPlan(1, (prefill(1, 0, 0, 10, 10, True),)))
        assert isinstance(first, StepResult)
        assert first.finished - first.started == pytest.approx(1 + 1.0 + 0.001 * 50)
        spans = (Span(1, 0, 10, 1, samples=True), prefill(2, 1, 6, 4, 10, True))
        mixed = await executor.submit(StepPlan(2, spans))
        assert isinstance(mixed, StepResult)
        assert mixed.finished - mixed.started == pytest.approx(1 + 0.4 + 0.01 + 0.001 * (24 + 8))

    clock.run(main())


@pytest.mark.parametrize(("acceptance", "expected"), [(0.0, 1), (1.0, 4)])
def test_drafts_are_verified(acceptance: float, expected: int) -> None:
    async def main() -> None:
        executor = make({1: 100, 2: 3}, Device(10, 4, acceptance=acceptance))
        spans = tuple(Span(id, id, 10, 4, draft=3, samples=True, begin=begin(10)) for id in (1, 2))
        result = await executor.submit(StepPlan(1, spans))
        assert isinstance(result, StepResult)
        assert result.tokens[0] == (FILLER,) * expected
        assert result.tokens[1] == ((FILLER,) if not acceptance else (FILLER, EOS))  # its third token is the last

    clock.run(main())


@pytest.mark.parametrize("segments", [1, 2, 7, 10])
def test_preemption_stops_at_a_boundary_and_loses_no_work(segments: int) -> None:
    async def main() -> None:
        executor = make({1: 1}, Device(10, 4, segments=segments))
        plan = StepPlan(1, (prefill(1, 0, 0, 80, 100, False),), preemptible=True)
        whole = MODEL.step_time(executor._look(plan)[0])
        step, stopped, worked = executor.submit(plan), 0, 0.0
        while True:
            began = executor.now()
            await asyncio.sleep(0.37 * whole / segments)
            executor.preempt(step)
            end = await step
            worked += executor.now() - began
            if isinstance(end, StepResult):
                break
            stopped += 1
            assert isinstance(end, Suspended)
            assert worked * segments / whole == pytest.approx(round(worked * segments / whole))
            await asyncio.sleep(5)  # other steps run meanwhile
            step = executor.submit(StepPlan(1 + stopped, plan.spans, preemptible=True, resume=end.step))
        assert worked == pytest.approx(whole)
        assert stopped == segments - 1

    clock.run(main())


def test_a_queued_step_can_be_stopped_before_it_begins() -> None:
    async def main() -> None:
        executor = make({1: 1})
        spans = (prefill(1, 0, 0, 5, 10, False),)
        first = executor.submit(StepPlan(1, spans))
        second = executor.submit(StepPlan(2, spans, preemptible=True))
        executor.preempt(second)
        done, stopped = await asyncio.gather(first, second)
        assert isinstance(done, StepResult) and isinstance(stopped, Suspended) and stopped.at == done.finished

    clock.run(main())


def test_invalid_plans_are_named() -> None:
    async def main() -> None:
        executor = make({1: 1})
        step = executor.submit(StepPlan(1, (prefill(1, 0, 0, 5, 10, False),)))
        with pytest.raises(InvalidValue, match="step 1 is not preemptible"):
            executor.preempt(step)
        with pytest.raises(InvalidValue, match="resumes step 9"):
            executor.submit(StepPlan(2, (), resume=9))
        await executor.close()

    clock.run(main())
    with pytest.raises(InvalidValue, match="segments=0 must be at least 1"):
        Device(1, 1, segments=0)


@pytest.mark.parametrize("behind", [True, False])
def test_transfers_wait_for_the_link_and_optionally_for_submitted_steps(behind: bool) -> None:
    async def main() -> list[float]:
        source, target = make({1: 1}, replace(DEVICE, behind=behind)), make({1: 1})
        step = source.submit(StepPlan(1, (prefill(1, 0, 0, 10, 10, True),)))
        kv_buffer = source.export_kv([1, 2])
        arrivals: list[float] = []

        async def move() -> None:
            await target.import_kv(kv_buffer, [5, 6])
            arrivals.append(target.now())

        await asyncio.gather(move(), move())
        result = await step
        assert isinstance(result, StepResult)
        return [at - (result.finished if behind else 0.0) for at in arrivals]

    one = 0.5 + 2 * 4 * 100 / 400
    assert clock.run(main()) == pytest.approx([one, 2 * one])


@pytest.mark.parametrize(
    ("preemptible", "lead", "pieces"),
    [(False, 0.0, 10), (True, 0.0, 4), (True, 0.02, 4), (True, 0.04, 5), (True, 1.0, 10)],
)
def test_a_transfer_waits_for_the_dispatched_segments_of_the_running_step(
    preemptible: bool, lead: float, pieces: int
) -> None:
    """Requested at 0.37 of the step, it waits for the fourth of ten segments and those dispatched, or for all.

    lead: as a share of the step.
    """

    async def scenario() -> None:
        plan = StepPlan(1, (prefill(1, 0, 0, 80, 100, False),), preemptible=preemptible)
        whole = MODEL.step_time(Load(80, 0, 80 * 80 / 2))
        executor = make({1: 1}, Device(10, 4, segments=10, lead=lead * whole, behind=True, latency=0.0))
        executor.submit(plan)
        await asyncio.sleep(0.37 * whole)
        await executor.import_kv(executor.export_kv([1]), [2])
        assert executor.now() == pytest.approx(pieces * whole / 10, rel=1e-9)

    clock.run(scenario())
