"""What is said of an instance's running step and of its requests agrees with its scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.engine.runtime.activity import Activity, activity
from jaxserve.sched.api.log import Log
from jaxserve.sched.api.plan import StepPlan
from jaxserve.sched.api.policy import Limits
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.recorded.record import Recorder
from jaxserve.sched.sim import simulate
from tests.support.sched.presets import CHAT, TINY


class Watching(Recorder):
    """Looks at each instance right before a step of it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[StepPlan, Activity, int, int]] = []
        self.schedulers: dict[str, Scheduler] = {}

    def instance(self, name: str, limits: Limits, now: Callable[[], float], then: Log) -> Log:
        log = super().instance(name, limits, now, then)

        def looked(kind: str, **fields: Any) -> None:
            if kind == "settle":
                scheduler = self.schedulers[name]
                assert scheduler.oldest is not None
                found = activity(scheduler, now())
                self.seen.append((scheduler.oldest.plan, found, scheduler.running, scheduler.waiting))
            log(kind, **fields)

        return looked

    def attach(self, name: str, scheduler: Scheduler) -> None:
        super().attach(name, scheduler)
        self.schedulers[name] = scheduler


@pytest.mark.parametrize("mesh", ["1x1", "2x1"])
def test_it_is_the_oldest_step_and_every_request(mesh: str) -> None:
    watching = Watching()
    simulate(CHAT, "distserve", mesh, TINY, qps=60, num_requests=40, recorder=watching)
    assert watching.seen
    for plan, found, running, waiting in watching.seen:
        assert found.step is not None
        tokens = sum(span.length for span in plan.spans)
        assert found.step.prefill + found.step.decodes == tokens and found.step.seconds > 0
        assert sum(found.running.values()) <= running and sum(found.waiting.values()) <= waiting
        assert sum(found.running.values()) + sum(found.waiting.values()) > 0
    assert any(one.step is not None and one.step.decodes for _, one, _, _ in watching.seen)
    assert all(activity(one, 0.0) == Activity() for one in watching.schedulers.values()), "idle at the end"
