"""The JAX executor: dispatches steps to the devices at once; a thread waits for their results."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from typing import Any

import jax
import numpy as np

from jaxserve.engine.memory.transfer import KVBuffer, cut, padded, piece_sizes
from jaxserve.engine.programs.inputs import Batch, Bucket, InputBuilder, SlotTable
from jaxserve.engine.programs.pooling import POOLED
from jaxserve.engine.programs.segments import Walk
from jaxserve.engine.runtime.checks import cause
from jaxserve.engine.runtime.device_state import Computed, DeviceState, StepOutputs
from jaxserve.engine.runtime.doubts import Doubts
from jaxserve.engine.runtime.masks import Masker, Masks, StepMasks
from jaxserve.engine.runtime.results import read
from jaxserve.engine.runtime.segment_pace import SegmentPace
from jaxserve.engine.runtime.step_job import Flying, StepJob
from jaxserve.sched.api.errors import InvalidValue, JaxserveError, StepFailed
from jaxserve.sched.api.executor import Step
from jaxserve.sched.api.plan import Span, StepPlan, StepResult, Suspended
from jaxserve.sched.api.pooling import MEAN
from jaxserve.sched.api.preemption import stopping
from jaxserve.sched.api.thinking import ThinkingMarkers
from jaxserve.structured.compiler import Compiler

log = logging.getLogger(__name__)

LEAST_LEAD, MOST_LEAD = 3e-3, 8e-3  # seconds; an event loop's timer wakes up to 1 ms late


class JaxExecutor:
    """The executor of one instance. Only waiting happens outside the event loop's thread.

    A preemptible step is dispatched in segments, each when `pace` says so.

    fault: called with each plan at the point at which the device could raise; an exception from it
    counts as the device's. For fault injection.
    """

    def __init__(
        self,
        name: str,
        state: DeviceState,
        compiler: Compiler | None = None,
        markers: ThinkingMarkers | None = None,
        ready: Collection[Bucket] | None = None,
    ) -> None:
        """compiler, markers: for structured outputs, see `Masker`. ready: buckets to use until `open`; None: all."""
        self.name = name
        self.pace = SegmentPace()
        self.fault: Callable[[StepPlan], None] | None = None
        self.submit_seconds = 0.0  # moving average of the time that `submit` takes
        self.steps = 0
        self.rebuilds = 0
        self._state = state
        self._limits = state.programs.limits
        self._inputs = InputBuilder(self._limits, ready)
        self._slots = SlotTable(self._limits)
        self._masker = Masker(name, self._limits, compiler, markers)
        self._sizes = piece_sizes(self._limits.row_pages)[0 if state.complete else -1 :]
        self._life = 0
        self._lost = False  # a step raised, and `rebuild` has not been called since
        self._flying: dict[Step, StepJob] = {}
        self._queue: deque[StepJob] = deque()  # steps that are not completely dispatched, in order
        self._suspended: dict[int, StepJob] = {}  # by step
        self._doubts = Doubts(self.page_size)
        self._finished = 0.0
        self._timer: asyncio.TimerHandle | None = None  # when to dispatch a segment
        self._submitted: queue.SimpleQueue[tuple[StepJob, jax.Array | None] | None] = queue.SimpleQueue()
        self._waiter: threading.Thread | None = None  # created with the first step
        self._movers = ThreadPoolExecutor(4, thread_name_prefix=f"jaxserve-{name}-kv")

    @property
    def pages(self) -> int:
        return self._limits.pages

    @property
    def page_size(self) -> int:
        return self._limits.page_size

    @property
    def largest_piece(self) -> int:
        """The most pages in a piece of a KV buffer."""
        return self._sizes[-1]

    @property
    def ready(self) -> frozenset[Bucket]:
        """The buckets whose programs are in use."""
        return self._inputs.ready

    def open(self, buckets: Collection[Bucket], complete: bool) -> None:
        """Use more programs from the next step on. complete: all programs are ready, those that only save time too."""
        self._inputs.open(buckets)
        if complete:
            self._state.complete = True
            self._sizes = piece_sizes(self._limits.row_pages)

    @property
    def preemptible(self) -> bool:
        """Whether steps of prompt chunks alone can be preempted."""
        return self._state.segments is not None

    @property
    def pieces(self) -> int:
        """The number of segments of a preemptible step; 1 if there are none."""
        segments = self._state.segments
        return 1 if segments is None else len(segments.links)

    @property
    def stopping(self) -> float:
        """The largest share of a step that still runs after `preempt`; 0 if no step can be preempted."""
        return stopping(self.pieces) if self.preemptible else 0.0

    @property
    def lead(self) -> float:
        return min(max(LEAST_LEAD + 2 * self.submit_seconds, LEAST_LEAD), MOST_LEAD)

    @property
    def state(self) -> DeviceState:
        """The state on the devices; used by warm-up."""
        return self._state

    def now(self) -> float:
        return time.perf_counter()

    def submit(self, plan: StepPlan) -> Step:
        step: Step = asyncio.get_running_loop().create_future()
        if plan.resume is not None and plan.resume not in self._suspended:
            raise InvalidValue(f"step {plan.step} resumes step {plan.resume}, which is not suspended", "resume")
        self._check_pool()
        if self._waiter is None or not self._waiter.is_alive():
            self._waiter = threading.Thread(target=self._wait, name=f"jaxserve-{self.name}", daemon=True)
            self._waiter.start()
        job = self._flying[step] = StepJob(plan, step, self._life, self.now())
        try:
            if plan.resume is not None:
                job.go_on(self._suspended.pop(plan.resume))
            else:
                job.batch = self._prepare(plan)
                job.walk = self._state.walk(job.batch) if plan.preemptible else None
            self._queue.append(job)
            self._dispatch()
        except Exception as error:  # the pool may already be donated
            self._fail(self._life, error)
            return step
        self._note(self.now() - job.submitted)
        return step

    def _prepare(self, plan: StepPlan) -> Batch:
        for span in plan.spans:
            if span.draft > self._limits.draft:
                raise InvalidValue(
                    f"{span.draft=} of request {span.request}: this executor drafts at most {self._limits.draft} tokens"
                )
            if span.begin is not None:
                self._masker.begin(span.slot, span.begin)
                self._slots.begin(span.slot, span.begin)
                self._state.begin(span.slot, span.begin, span.start)
                if self._slots.keeps_history(span.slot):
                    self._state.remember(span.slot, span.begin)
            if span.new_pages:
                if dirty := self._doubts.reuse(span, self._slots):
                    self._state.scrub(dirty, self._sizes[-1])
                self._slots.extend(span.slot, span.new_pages)
            if not span.samples:
                self._doubts.write(span, self._slots)
        batch = self._inputs.build(plan.spans, self._slots, plan.shared)
        constrained = self._masker.constrained(plan.spans)
        return batch._replace(constrained=constrained) if constrained else batch

    def _dispatch(self) -> None:
        """Dispatch queued steps in order, as far as possible."""
        while self._queue and self._go(self._queue[0]):
            self._queue.popleft()

    def _go(self, job: StepJob) -> bool:
        """Dispatch a step, or some of its segments; return whether it leaves the queue."""
        if job.walk is not None:
            while job.walk.left and not job.stop and self._due(job):
                self._segment(job, job.walk)
            if job.walk.left:
                return job.stop and not job.flying and self._suspend(job)
        if job.batch.constrained:
            computed, masks = self._compute(job)
            if masks is None:
                return False
            drawn, hidden = self._state.choose(job.batch, job.plan.spans, computed, masks.rows, masks.ahead)
        elif job.walk is None:
            drawn, hidden = self._state.step(job.batch, job.plan.spans)
        else:
            drawn, hidden = self._state.end(job.walk, job.plan.spans)
        job.drawn = drawn
        self._score(job.plan.spans, drawn, hidden)
        self._pool(job.plan.spans, drawn, hidden)
        job.commit()
        self._submitted.put((job, None))
        return True

    def _due(self, job: StepJob) -> bool:
        """Return whether to dispatch the next segment of a step now; otherwise set a timer for it if needed."""
        began, now = max(job.flying[0].at, self._finished) if job.flying else 0.0, self.now()
        left = self.pace.wait([flying.kind for flying in job.flying], began, now)
        if 0.0 < left < inf:
            self._wake(now + left)
        return left == 0.0

    def _wake(self, at: float) -> None:
        """Dispatch again at a time."""

        def due() -> None:
            self.pace.woke(self.now() - at)
            self._go_on()

        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(at - self.now(), due)

    def _segment(self, job: StepJob, walk: Walk) -> None:
        """Dispatch the next segment of a step."""
        at, kind = self.now(), (walk.batch.bucket, walk.link.kind)
        mark = self._state.segment(walk)
        self.pace.dispatched(self.now() - at)
        job.flying.append(Flying(kind, at))
        if walk.left:  # the last one is awaited together with the outputs
            self._submitted.put((job, mark))

    def _compute(self, job: StepJob) -> tuple[Computed, Masks | None]:
        """Dispatch a constrained step up to its sampling, and make its masks once the tokens before are known."""
        if job.computed is None:
            if job.walk is None:
                forced = self._masker.forced(job.batch, job.plan.spans)
                job.computed = self._state.compute(job.batch, forced)
            else:
                job.computed = self._state.finish(job.walk)
            job.masks = StepMasks(self._masker, job.batch, job.plan.spans)
            job.commit()
        assert job.masks is not None
        job.masks.make(job.computed.drafted, job.step.get_loop(), partial(self._masked, job))
        return job.computed, job.masks.made

    def _masked(self, job: StepJob, error: BaseException | None) -> None:
        """Handle the masks of a step: its sampling may be dispatched."""
        if job.life != self._life:
            return
        if error is not None:  # of the devices: they are read for drafted tokens
            self._fail(self._life, error)
            return
        self._go_on()

    def _passed(self, job: StepJob, before: float, ended: float) -> None:
        """Handle a finished segment: the next one may be dispatched.

        before, ended: when the work before it ended, and when it did itself.
        """
        if job.life != self._life:
            return
        kind, at = job.flying.popleft()
        self.pace.ended(kind, ended - max(at, before))
        self._go_on()

    def _go_on(self) -> None:
        try:
            self._dispatch()
        except Exception as error:
            self._fail(self._life, error)

    def _suspend(self, job: StepJob) -> bool:
        """Suspend a step; all of its dispatched segments are done."""
        del self._flying[job.step]
        self._suspended[job.plan.step] = job
        job.commit()
        if not job.step.done():
            started = self.now() if job.started is None else job.started
            job.step.set_result(Suspended(job.plan.step, started, max(started, self._finished)))
        return True

    def _score(self, spans: Sequence[Span], drawn: StepOutputs, hidden: jax.Array) -> None:
        """Dispatch log-probabilities of prompt tokens for the requests that asked for them."""
        if not self._slots.scored:
            return
        at = 0
        for index, span in enumerate(spans):
            prompt = self._slots.scored.get(span.slot, ())
            targets = prompt[span.start + 1 : span.start + span.length + 1]
            if targets:
                count = self._slots.begins[span.slot].params.prompt_logprobs or 0
                drawn.scores[index] = count, self._state.score(hidden, at, np.array(targets, np.int32))
            at += span.length

    def _pool(self, spans: Sequence[Span], drawn: StepOutputs, hidden: jax.Array) -> None:
        """Dispatch the sums of hidden states for the requests that want a vector."""
        if not self._slots.pooled:
            return
        at, vectors = 0, []
        for index, span in enumerate(spans):
            kind = self._slots.pooled.get(span.slot)
            if kind == MEAN:
                vectors.append((index, (at, span.length)))
            elif kind is not None and span.samples:
                vectors.append((index, (at + span.length - 1, 1)))
            at += span.length
        for begin in range(0, len(vectors), POOLED):
            indices, parts = zip(*vectors[begin : begin + POOLED], strict=True)
            drawn.pooled.append((indices, self._state.pool(hidden, parts)))

    def _note(self, seconds: float) -> None:
        self.steps += 1
        self.submit_seconds += (seconds - self.submit_seconds) * max(0.05, 1 / self.steps)

    # results

    def _wait(self) -> None:
        """Wait for dispatched steps and segments in order. Runs in the waiter's thread."""
        while (waiting := self._submitted.get()) is not None:
            try:
                self._await(*waiting)
            except BaseException as error:  # SystemExit, for example: not a step's failure, and this thread ends
                waiting[0].step.get_loop().call_soon_threadsafe(self._died, error)
                return
            del waiting  # otherwise the finished job would stay alive until the next arrives

    def _await(self, job: StepJob, mark: jax.Array | None) -> None:
        loop = job.step.get_loop()
        news: partial[None]
        try:
            if job.started is None:
                if self.fault is not None:
                    self.fault(job.plan)
                job.started = max(job.submitted, self._finished)
            if mark is not None:
                before = self._finished
                mark.block_until_ready()
                self._finished = self.now()
                news = partial(self._passed, job, before, self._finished)
            else:
                job.drawn.wait()
                self._finished = self.now()
                result = read(job.plan, job.batch, job.drawn, job.started, self._finished)
                news = partial(self._resolve, job, result)
        except Exception as error:
            news = partial(self._fail, job.life, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(news)

    def _resolve(self, job: StepJob, result: StepResult) -> None:
        if job.life != self._life:
            return  # the future already holds the error that ended this life
        del self._flying[job.step]
        if job.masks is not None and job.masks.made is not None:
            result = result._replace(held=self._masker.tell(job.batch, job.plan.spans, result))
            if job.masks.made.ended:
                result = result._replace(ended={**result.ended, **job.masks.made.ended})
        self._doubts.settle(job.plan.spans, result, self._slots)
        if not job.step.done():
            job.step.set_result(result)
        if self._queue and self._queue[0].batch.constrained:
            self._go_on()

    def _fail(self, life: int, error: BaseException) -> None:
        """Fail every step in flight after the device raised; the pool counts as lost."""
        if life != self._life:
            return
        log.error("%s: a step raised; the KV pool is rebuilt", self.name, exc_info=error)
        self._end_all(error, lambda job: StepFailed(f"step {job.plan.step} of instance {self.name}: {cause(error)}"))

    def _died(self, error: BaseException) -> None:
        """Fail every step after the waiter's thread ended: no result can arrive any more."""
        why = f"the thread that waits for the devices of instance {self.name} ended: {cause(error)}"
        self._end_all(error, lambda job: JaxserveError(why))

    def _end_all(self, error: BaseException, failure: Callable[[StepJob], JaxserveError]) -> None:
        """End every step in flight with an error and mark the pool as lost."""
        self._life += 1
        self._lost = True
        self._queue.clear()
        flying, self._flying = self._flying, {}
        for step, job in flying.items():
            job.commit()
            job.walk = None  # a stored error keeps its frames, and these keep the arrays, alive
            if not step.done():
                failed = failure(job)
                failed.__cause__ = error
                step.set_exception(failed)

    def rebuild(self) -> None:
        self.rebuilds += 1
        self._doubts.clear()
        self._suspended.clear()  # their activations are lost with the pool
        self._slots = SlotTable(self._limits)
        self._masker.clear()
        self._state.rebuild()
        self._lost = False

    def _check_pool(self) -> None:
        if self._lost:
            raise StepFailed(f"instance {self.name} lost its KV pool; it accepts no work until the pool is rebuilt")

    def preempt(self, step: Step) -> None:
        job = self._flying.get(step)
        if job is None:
            return
        if not job.plan.preemptible:
            raise InvalidValue(f"step {job.plan.step} is not preemptible", "preemptible")
        job.stop = True

    def committed(self, step: Step) -> asyncio.Future[Any]:
        job = self._flying.get(step)
        return step if job is None else job.committed

    def unheld(self, slot: int) -> asyncio.Future[None]:
        return self._masker.prepare(slot)

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._slots.release(slot)
        self._masker.release(slots)

    # pages

    def export_kv(self, pages: Sequence[int]) -> KVBuffer:
        self._check_pool()
        pieces = []
        for size, mine in cut(pages, self._sizes):
            pieces.append((len(mine), self._state.export(padded(mine, size, self._limits.pages))))
        return KVBuffer(len(pages), tuple(pieces))

    async def import_kv(self, kv_buffer: KVBuffer, pages: Sequence[int]) -> None:
        """Import a KV buffer into `pages`.

        Waits for the copy before it touches the pool: a scatter that waits for another instance's long
        step would delay every later step.
        """
        if kv_buffer.pages != len(pages):
            raise JaxserveError(f"a KV buffer of {kv_buffer.pages} pages cannot go into {len(pages)} pages")
        self._check_pool()
        loop, life = asyncio.get_running_loop(), self._life
        arrived = []
        for _, piece in kv_buffer.pieces:
            await loop.run_in_executor(self._movers, jax.block_until_ready, piece)
            arrived.append(await loop.run_in_executor(self._movers, self._state.receive, piece))  # may copy
        await loop.run_in_executor(self._movers, jax.block_until_ready, arrived)
        if life != self._life:
            raise StepFailed(
                f"instance {self.name} lost its KV pool while {kv_buffer.pages} pages were being transferred"
            )
        at = 0
        for (count, _), piece in zip(kv_buffer.pieces, arrived, strict=True):
            self._state.fill(padded(pages[at : at + count], piece[0].shape[2], self._limits.pages), piece)
            self._doubts.add(pages[at : at + count])
            at += count

    def export_state(self, slot: int) -> tuple[jax.Array, ...] | None:
        self._check_pool()
        return self._state.export_state(slot)

    async def import_state(self, state: tuple[jax.Array, ...], slot: int) -> None:
        self._check_pool()
        loop, life = asyncio.get_running_loop(), self._life
        await loop.run_in_executor(self._movers, jax.block_until_ready, state)  # as in `import_kv`
        arrived = await loop.run_in_executor(self._movers, self._state.receive_state, state)
        await loop.run_in_executor(self._movers, jax.block_until_ready, arrived)
        if life != self._life:
            raise StepFailed(f"instance {self.name} lost its states while one was being transferred")
        self._state.fill_state(slot, arrived)

    async def rest(self) -> None:
        """Wait for the steps in flight and forget all requests, so that another scheduler can start."""
        await self._landed()
        if self._lost:
            self.rebuild()
        self._suspended.clear()
        self.release(range(self._limits.slots))

    async def _landed(self) -> None:
        while self._flying:
            await asyncio.wait(list(self._flying))

    async def close(self) -> None:
        await self._landed()
        if self._waiter is not None and self._waiter.is_alive():
            self._submitted.put(None)
            await asyncio.get_running_loop().run_in_executor(self._movers, self._waiter.join)
        self._movers.shutdown(wait=False)
        self._masker.close()
