"""A step from when it is submitted to an executor until its result is known."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

from jaxserve.engine.programs.inputs import Batch
from jaxserve.engine.programs.segments import Walk
from jaxserve.engine.runtime.device_state import Computed, StepOutputs
from jaxserve.engine.runtime.masks import StepMasks
from jaxserve.sched.api.executor import Step
from jaxserve.sched.api.plan import StepPlan


class Flying(NamedTuple):
    """A dispatched segment that is not done."""

    kind: Hashable
    at: float  # when it was dispatched


class StepJob:
    """A submitted step. Writer: its executor; for `started`, the thread that waits for the devices."""

    __slots__ = (
        "batch", "committed", "computed", "drawn", "flying", "life", "masks", "plan", "started", "step", "stop",
        "submitted", "walk",
    )  # fmt: skip

    batch: Batch  # once prepared
    drawn: StepOutputs  # once all of it is dispatched

    def __init__(self, plan: StepPlan, step: Step, life: int, submitted: float) -> None:
        """life: generation of the device state that it runs on."""
        self.plan = plan
        self.step = step
        self.life = life
        self.submitted = submitted
        self.walk: Walk | None = None  # its segments; None: dispatched as a whole
        self.started: float | None = None
        self.stop = False  # asked to stop at the next segment boundary
        self.flying: deque[Flying] = deque()  # segments dispatched and not done
        self.computed: Computed | None = None  # a constrained step whose sampling waits for its masks
        self.masks: StepMasks | None = None  # of a constrained step, once it is computed
        self.committed: asyncio.Future[None] = step.get_loop().create_future()

    def go_on(self, suspended: StepJob) -> None:
        """Continue a suspended step."""
        self.batch, self.walk = suspended.batch, suspended.walk

    def commit(self) -> None:
        """Mark the step as no longer preemptible: all of it is dispatched, or no more of it will be."""
        if not self.committed.done():
            self.committed.set_result(None)
