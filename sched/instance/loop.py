"""The loop of one instance: plan, submit, await, settle. Real and simulated time run the same code."""

from __future__ import annotations

import asyncio
from math import isfinite
from typing import Any, Protocol

from ..api.errors import StepFailed
from ..api.executor import Executor, Step
from ..api.plan import Delta, Span, Suspended
from .scheduler import Scheduler
from .step_settler import Settled
from .watchdog import PATIENT, Patience, Watchdog

FEW = 15  # times of failed steps kept, besides the last


class Listener(Protocol):
    """The receiver of an instance's events: the Cluster."""

    def settled(self, core: Core, settled: Settled) -> None: ...  # a step has ended
    def dropped(self, core: Core) -> None: ...  # the last plan dropped the KV of requests
    def recovered(self, core: Core, deltas: list[Delta]) -> None: ...  # a step raised, and the KV pool is new
    def hung(self, core: Core, seconds: float) -> None: ...  # a step has not ended after `seconds`
    def returned(self, core: Core) -> None: ...  # a hung step has ended


class Core:
    """A Scheduler, its Executor and their loop. Writer of both, with the Cluster in the same event loop."""

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        executor: Executor,
        listener: Listener,
        patience: Patience = PATIENT,
    ) -> None:
        self.name = name
        self.scheduler = scheduler
        self.executor = executor
        self.failed: list[float] = []  # times at which consecutive steps raised; empty after a step that did not
        self._listener = listener
        self._wanted = asyncio.Event()
        self._watchdog = Watchdog(patience, executor.now, self._overdue)

    def wake(self) -> None:
        """Plan again, because something changed."""
        self._wanted.set()

    async def run(self) -> None:
        """Run until cancelled.

        One step runs at a time. The next one is planned `executor.lead` before its predicted end.
        """
        running: Step | None = None
        while True:
            if running is None:
                running = self._submit()
                if running is None:
                    await self._wanted.wait()
                continue
            self._watchdog.began(self.scheduler.oldest.left if self.scheduler.oldest is not None else 0.0)
            await self._nearly(running)
            ahead = None if running.done() else self._submit()
            if not await self._settle(running):
                await self._recover(ahead)
                ahead = None
            self._watchdog.ended()
            if self.scheduler.hung:
                self.scheduler.hang(False)
                self._listener.returned(self)
            running = ahead

    def _overdue(self, seconds: float) -> None:
        self.scheduler.hang(True)
        self._listener.hung(self, seconds)

    def _submit(self) -> Step | None:
        self._wanted.clear()  # this plan includes all changes up to now
        now = self.executor.now()
        start = max(now, self.scheduler.ends)
        drops = self.scheduler.counters.preemptions
        plan = self.scheduler.plan(now, start)
        if self.scheduler.counters.preemptions > drops:
            self._listener.dropped(self)
        if plan is None:
            return None
        self.scheduler.set_ends(start + self.scheduler.predicted)
        return self.executor.submit(plan)

    async def _nearly(self, step: Step) -> None:
        """Wait until the step is done or predicted to end within the executor's lead."""
        lead, oldest = self.executor.lead, self.scheduler.oldest
        if oldest is not None and oldest.plan.preemptible:
            await self._watch(step)
        if step.done():
            return
        if lead == 0.0:
            await asyncio.wait([step])
        elif (left := self.scheduler.ends - lead - self.executor.now()) > 0:
            await asyncio.wait([step], timeout=left)

    async def _watch(self, step: Step) -> None:
        """Ask whether to stop a preemptible step, at every event and when the policy asked for it."""
        committed = self.executor.committed(step)
        while not committed.done():
            event = asyncio.ensure_future(self._wanted.wait())
            either: list[asyncio.Future[Any]] = [committed, event]
            left = self.scheduler.asks_again - self.executor.now()
            timeout = max(0.0, left) if isfinite(left) else None
            await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            event.cancel()
            self._wanted.clear()
            if not committed.done() and self.scheduler.interrupts(self.executor.now()):
                self.executor.preempt(step)
                await asyncio.wait([step])

    async def _settle(self, step: Step) -> bool:
        try:
            result = await step
        except StepFailed:
            return False
        if isinstance(result, Suspended):
            self.scheduler.set_ends(result.at)
            self.scheduler.suspend(result)
            return True
        behind = self.scheduler.predicted if self.scheduler.in_flight > 1 else 0.0
        self.scheduler.set_ends(result.finished + behind)
        self.failed.clear()
        oldest = self.scheduler.oldest
        self._listener.settled(self, self.scheduler.settle(result))
        for index in sorted(result.held):
            if oldest is not None:
                self._await_ready(oldest.plan.spans[index])
        return True

    def _await_ready(self, span: Span) -> None:
        """Let a held request take part in steps again once the executor is ready for it."""
        if not self.scheduler.holds(span.request, span.slot):
            return  # it has ended, left, or is in the next step, whose result may hold it

        def ready(future: asyncio.Future[Any]) -> None:
            if not future.cancelled():
                future.exception()  # its next step will meet the same error
                self.scheduler.unhold(span.request, span.slot)
                self.wake()

        self.executor.unheld(span.slot).add_done_callback(ready)

    async def _recover(self, ahead: Step | None) -> None:
        if ahead is not None:
            await asyncio.wait([ahead])
            ahead.exception()  # retrieve the exception, which is expected: its buffers are gone
        self.scheduler.set_ends(self.executor.now())
        self.failed = [*self.failed[-FEW:], self.executor.now()]
        self.executor.rebuild()
        self._listener.recovered(self, self.scheduler.recover())
