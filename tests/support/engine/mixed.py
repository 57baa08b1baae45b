"""Requests on an executor with suspended and resumed steps, one action at a time."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.runtime.segment_pace import SegmentPace
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import StepPlan, StepResult, Suspended
from tests.support.engine.steps import Job

Action = tuple[int, int, int | None, str]  # request, tokens, segments ahead (None: to the end), action


def jobs_of(prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams]) -> list[Job]:
    return [
        Job(prompt, params, slot=slot, seed=7 * slot)
        for slot, (prompt, params) in enumerate(zip(prompts, params, strict=True))
    ]


class Mixed:
    """Requests on one executor, one random action at a time. Writer: the test."""

    def __init__(self, executor: JaxExecutor, jobs: Sequence[Job], new: int) -> None:
        """Prepare `jobs`, of which each is to get `new` tokens."""
        self.executor = executor
        self.jobs = jobs
        self.new = new
        self.stopped: dict[int, tuple[StepPlan, Job]] = {}
        self.number = self.stops = 0

    def idle(self) -> list[Job]:
        return [
            job
            for job in self.jobs
            if all(job is not one for _, one in self.stopped.values()) and job.sampled < self.new
        ]

    async def prompts(self, job: Job, chunk: int, depth: int | None) -> None:
        span = job.span(chunk)
        await self._preemptible(StepPlan(self.number, (span,), preemptible=True), job, depth)

    async def resume(self, step: int, depth: int | None) -> None:
        plan, job = self.stopped.pop(step)
        await self._preemptible(StepPlan(self.number, plan.spans, preemptible=True, resume=step), job, depth)

    async def _preemptible(self, plan: StepPlan, job: Job, depth: int | None) -> None:
        """Submit a preemptible step for `depth` segments. `depth` None: to the end."""
        self.number += 1
        self.executor.pace = SegmentPace(depth)
        step = self.executor.submit(plan)
        if depth is not None:
            self.executor.preempt(step)
        result = await step
        if isinstance(result, Suspended):
            self.stopped[result.step] = plan, job
            self.stops += 1
        else:
            job.settle(result, 0)

    async def decode(self) -> None:
        ready = [job for job in self.idle() if job.computed >= len(job.prompt)]
        if ready:
            result = await self.executor.submit(StepPlan(self.number, tuple(job.span() for job in ready)))
            assert isinstance(result, StepResult)
            self.number += 1
            for index, job in enumerate(ready):
                job.settle(result, index)

    async def play(self, actions: Sequence[Action]) -> None:
        """Perform the actions that are possible, then finish all requests."""
        for number, chunk, depth, what in [*actions, *[(i, 30, None, "start") for i in range(len(self.jobs))] * 2]:
            starts = [job for job in self.idle() if job.computed < len(job.prompt)]
            if what == "resume" and self.stopped:
                await self.resume(sorted(self.stopped)[number % len(self.stopped)], depth)
            elif what == "decode":
                await self.decode()
            elif starts:
                await self.prompts(starts[number % len(starts)], chunk, depth)
        for step in list(self.stopped):
            await self.resume(step, None)
        for job in self.jobs:
            while job.computed < len(job.prompt):
                await self.prompts(job, 30, None)
        while self.idle():
            await self.decode()
        self.executor.release([job.slot for job in self.jobs])
