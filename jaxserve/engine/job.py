"""A step on an instance's devices, from its submission to its result."""

from __future__ import annotations

import asyncio

from jaxserve.engine.inputs import Batch
from jaxserve.engine.segments import Walk
from jaxserve.engine.state import Drawn
from jaxserve.sched.api.executor import Step
from jaxserve.sched.api.plan import StepPlan


class Job:
    """Writer: the executor that holds it; of `started` the thread that waits for the devices."""

    __slots__ = ("ahead", "batch", "committed", "drawn", "life", "plan", "started", "step", "stop", "submitted", "walk")

    batch: Batch  # once prepared
    drawn: Drawn  # once all of it is dispatched

    def __init__(self, plan: StepPlan, step: Step, life: int, submitted: float) -> None:
        """`life`: of the device state it runs on."""
        self.plan = plan
        self.step = step
        self.life = life
        self.submitted = submitted
        self.walk: Walk | None = None  # its segments; None: it is dispatched as a whole
        self.started: float | None = None
        self.stop = False  # asked to stop at a boundary
        self.ahead = 0  # segments dispatched and not done
        self.committed: asyncio.Future[None] = step.get_loop().create_future()

    def go_on(self, suspended: Job) -> None:
        """From where another stopped."""
        self.batch, self.walk = suspended.batch, suspended.walk

    def commit(self) -> None:
        """From now on it cannot be stopped: all of it is dispatched, or no more of it will be."""
        if not self.committed.done():
            self.committed.set_result(None)
