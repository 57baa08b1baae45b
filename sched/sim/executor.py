"""The simulated `Executor`: a step-time model, a link, and a table of hidden output lengths."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple, Protocol

import numpy as np

from ..api.errors import InvalidValue, StepFailed
from ..api.executor import Step
from ..api.perf import Load
from ..api.plan import StepPlan, StepResult, Suspended
from .clock import EVENT, VirtualLoop

FILLER, EOS, END_THINKING = 1, 2, 3  # the only token ids that a simulation samples
DRAWS = 4096  # noise factors drawn at a time


class StepTime(Protocol):
    """True step times of a simulation, which a scheduler's `PerfModel` only predicts."""

    def step_time(self, load: Load) -> float: ...


@dataclass(frozen=True, slots=True)
class Device:
    """One simulated instance.

    bandwidth (bytes/s), latency (s): of the link by which KV arrives, one KV buffer at a time.
    behind: KV leaves only after the work that the device has already been given, as if the copy shared the
        stream of the steps: after the running step, or after the dispatched segments of a preemptible one.
        If False, KV leaves at once. A Cluster exports only KV that completed steps have written.
    segments: equal parts of a preemptible step, which can stop at the end of each.
    lead: seconds before a segment's end at which the next one is dispatched, and can no longer be stopped.
    short: steps of up to this many tokens run as a whole.
    noise: standard deviation of the lognormal factor, of mean 1, on step times.
    acceptance: probability that a drafted token is accepted.
    """

    pages: int
    page_size: int
    kv_bytes_per_token: int = 0
    bandwidth: float = 450e9
    latency: float = 1e-3
    segments: int = 1
    lead: float = 0.0
    short: int = 0
    noise: float = 0.0
    acceptance: float = 0.0
    behind: bool = False

    def __post_init__(self) -> None:
        for name, ok, allowed in (
            ("pages", self.pages >= 1, "at least 1"),
            ("page_size", self.page_size >= 1, "at least 1 token"),
            ("bandwidth", self.bandwidth > 0, "more than 0 bytes/s"),
            ("latency", self.latency >= 0, "0 s or more"),
            ("segments", self.segments >= 1, "at least 1"),
            ("lead", self.lead >= 0, "0 s or more"),
            ("short", self.short >= 0, "0 tokens or more"),
            ("noise", 0 <= self.noise < 1, "between 0 and 1"),
            ("acceptance", 0 <= self.acceptance <= 1, "between 0 and 1"),
        ):
            if not ok:
                raise InvalidValue(f"device {name}={getattr(self, name)!r} must be {allowed}", name)


class SimKVBuffer(NamedTuple):
    """KV in transfer: its size, and the last step that writes it."""

    pages: int
    after: Step | None
    at: float = 0.0  # when the segments dispatched before it are done


class _Running:
    """A submitted step. Writer: the SimExecutor that holds it."""

    __slots__ = ("began", "done", "future", "plan", "seconds", "stop", "timer", "tokens")

    def __init__(self, plan: StepPlan, future: Step, seconds: float, tokens: tuple[tuple[int, ...], ...]) -> None:
        self.plan = plan
        self.future = future
        self.seconds = seconds  # total
        self.tokens = tokens
        self.done = 0.0  # seconds computed before `began` if the step was suspended
        self.began = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.stop = False  # whether it was asked to stop before it began


class SimExecutor:
    """One instance in virtual time. Only the executor knows output lengths, so that no policy can see them."""

    lead = 0.0

    def __init__(
        self,
        model: StepTime,
        device: Device,
        outputs: Mapping[int, int],
        loop: VirtualLoop,
        *,
        thoughts: Mapping[int, int] | None = None,
        seed: int | Sequence[int] = 0,
        watch: Callable[[StepPlan, StepResult], None] | None = None,
        fails: Callable[[StepPlan], bool] | None = None,
    ) -> None:
        """Set up the instance.

        outputs: number of output tokens by request, including EOS.
        thoughts: number of thinking tokens by request, for requests that think.
        watch: called with every completed step.
        fails: a step for which it returns True raises StepFailed instead.
        """
        self._model = model
        self._device = device
        self._outputs = outputs
        self._thoughts = thoughts or {}
        self._loop = loop
        self._random = np.random.default_rng(seed)
        self._factors: list[float] = []
        self._watch = watch
        self._fails = fails
        self._queue: deque[_Running] = deque()  # steps submitted after the running one
        self._running: _Running | None = None
        self._suspended: dict[int, _Running] = {}
        self._last: Step | None = None
        self._prompts: dict[int, int] = {}  # slot -> prompt length of the request in it
        self._link_free = 0.0

    @property
    def pages(self) -> int:
        return self._device.pages

    @property
    def page_size(self) -> int:
        return self._device.page_size

    def now(self) -> float:
        return self._loop.now

    # steps

    def submit(self, plan: StepPlan) -> Step:
        future: Step = self._loop.create_future()
        if plan.resume is None:
            load, tokens = self._look(plan)
            job = _Running(plan, future, self._model.step_time(load) * self._factor(), tokens)
        else:
            before = self._suspended.pop(plan.resume, None)
            if before is None:
                raise InvalidValue(f"step {plan.step} resumes step {plan.resume}, which is not suspended", "resume")
            job = _Running(plan, future, before.seconds, before.tokens)
            job.done = before.done
        self._last = future
        if self._running is None:
            self._begin(job)
        else:
            self._queue.append(job)
        return future

    def rebuild(self) -> None:
        self._suspended.clear()  # their KV and activations are lost with the pool

    def preempt(self, step: Step) -> None:
        job = self._running if self._running is not None and self._running.future is step else None
        if job is None:
            for queued in self._queue:
                queued.stop = queued.stop or queued.future is step
            return
        if not job.plan.preemptible:
            raise InvalidValue(f"step {job.plan.step} is not preemptible", "preemptible")
        done = self._dispatched(job)
        if done is not None and job.timer is not None:
            job.timer.cancel()
            job.timer = self._loop.at(job.began + done - job.done, EVENT, self._suspend, job, done)

    def _dispatched(self, job: _Running) -> float | None:
        """Return the seconds of the running step that complete if it is stopped now, or None for the whole step."""
        device = self._device
        if not job.plan.preemptible or sum(span.length for span in job.plan.spans) <= device.short:
            return None
        segment = job.seconds / device.segments
        computed = job.done + self._loop.now - job.began
        boundary = max(ceil((computed + device.lead) / segment - 1e-9), round(job.done / segment) + 1)
        return boundary * segment if boundary < device.segments else None

    def committed(self, step: Step) -> Step:
        return step

    def unheld(self, slot: int) -> asyncio.Future[None]:
        raise AssertionError("its steps hold no request")

    def _result(self, job: _Running) -> StepResult:
        return StepResult(job.plan.step, job.began, self._loop.now, job.tokens)

    def _begin(self, job: _Running) -> None:
        self._running = job
        job.began = now = self._loop.now
        if job.stop:
            job.timer = self._loop.at(now, EVENT, self._suspend, job, job.done)
        else:
            job.timer = self._loop.at(now + job.seconds - job.done, EVENT, self._end, job)

    def _end(self, job: _Running) -> None:
        result = self._result(job)
        failed = self._fails is not None and self._fails(job.plan)
        if self._watch is not None and not failed:
            self._watch(job.plan, result)
        if not job.future.done():
            if failed:
                job.future.set_exception(StepFailed(f"step {job.plan.step} was made to fail"))
            else:
                job.future.set_result(result)
        self._next()

    def _suspend(self, job: _Running, done: float) -> None:
        job.done = done
        self._suspended[job.plan.step] = job
        if not job.future.done():
            job.future.set_result(Suspended(job.plan.step, job.began, self._loop.now))
        self._next()

    def _next(self) -> None:
        self._running = None
        if self._queue:
            self._begin(self._queue.popleft())

    def _look(self, plan: StepPlan) -> tuple[Load, tuple[tuple[int, ...], ...]]:
        """Return the load of a step, and the tokens that it will sample."""
        prompts, outputs, thoughts = self._prompts, self._outputs, self._thoughts
        prefill = decode = longest = context = prefix = quadratic = drafts = 0
        tokens: list[tuple[int, ...]] = []
        for request, slot, start, length, _, _, draft, samples, begin in plan.spans:
            if begin is not None:
                prompts[slot] = begin.prompt_length
            prompt = prompts[slot]
            if length == 1 + draft and start >= prompt:
                decode += length
                context += start
                if draft > drafts:
                    drafts = draft
                if start > longest:
                    longest = start
            else:
                prefill += length
                quadratic += 2 * length * start + length * length
                prefix += start
            if not samples:
                tokens.append(())
                continue
            index = start + length - draft - prompt  # of the first token sampled; 0 is the request's first
            left = outputs[request] - index
            sampled = self._verified(draft, left) if draft else _FILLER if left > 1 else _EOS
            if thoughts and 0 <= (place := thoughts.get(request, 0) - 1 - index) < len(sampled) - (sampled[-1] == EOS):
                sampled = (*sampled[:place], END_THINKING, *sampled[place + 1 :])
            tokens.append(sampled)
        load = Load(prefill, decode, quadratic / 2, longest, context, prefix, drafts)
        return load.share(plan.shared, self.page_size) if plan.shared else load, tuple(tokens)

    def _verified(self, draft: int, left: int) -> tuple[int, ...]:
        """Sample the accepted prefix of a draft, and the token that the target puts after it."""
        right = 0
        while right < draft and self._random.random() < self._device.acceptance:
            right += 1
        return (FILLER,) * right + _FILLER if right + 1 < left else (FILLER,) * (max(left, 1) - 1) + _EOS

    def _factor(self) -> float:
        sigma = self._device.noise
        if not sigma:
            return 1.0
        if not self._factors:
            self._factors = self._random.lognormal(-sigma * sigma / 2, sigma, DRAWS).tolist()
        return self._factors.pop()

    # rows and KV

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._prompts.pop(slot, None)

    def export_kv(self, pages: Sequence[int]) -> SimKVBuffer:
        if not self._device.behind:
            return SimKVBuffer(len(pages), None)
        running = self._running
        done = None if running is None else self._dispatched(running)
        if running is None or done is None:
            return SimKVBuffer(len(pages), self._last)
        return SimKVBuffer(len(pages), None, running.began + done - running.done)

    def export_state(self, slot: int) -> None:
        """Return None: simulated models have keys and values only."""

    async def import_state(self, state: None, slot: int) -> None:
        """Do nothing: there are no states."""

    async def import_kv(self, kv_buffer: SimKVBuffer, pages: Sequence[int]) -> None:
        """Wait until the KV is written and the link is free, then for the duration of the transfer."""
        if len(pages) != kv_buffer.pages:
            raise InvalidValue(f"a KV buffer of {kv_buffer.pages} pages does not fit {len(pages)} pages", "pages")
        if kv_buffer.after is not None and not kv_buffer.after.done():
            await asyncio.wait([kv_buffer.after])
        if kv_buffer.at > self._loop.now:
            await self._until(kv_buffer.at)
        device, now = self._device, self._loop.now
        size = kv_buffer.pages * device.page_size * device.kv_bytes_per_token
        self._link_free = max(self._link_free, now) + device.latency + size / device.bandwidth
        await self._until(self._link_free)

    def _until(self, when: float) -> asyncio.Future[None]:
        arrived: asyncio.Future[None] = self._loop.create_future()
        self._loop.at(when, EVENT, _arrive, arrived)
        return arrived

    async def close(self) -> None:
        """Wait for submitted steps to complete."""
        if self._last is not None and not self._last.done():
            await asyncio.wait([self._last])


_FILLER, _EOS = (FILLER,), (EOS,)


def _arrive(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
