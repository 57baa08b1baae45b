"""What each instance does now: its running step, and its requests by class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxserve.sched.api.request import State
from jaxserve.sched.instance.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class RunningStep:
    """The oldest step that has no result yet."""

    prefill: int  # prompt tokens
    decodes: int  # running decodes in it
    seconds: float  # predicted, for the whole step
    left: float  # seconds until its predicted end; negative if it is late


@dataclass(frozen=True, slots=True)
class Activity:
    """A snapshot of one instance."""

    step: RunningStep | None = None
    running: Mapping[str, int] = field(default_factory=dict)  # requests that hold a slot, by class
    waiting: Mapping[str, int] = field(default_factory=dict)  # requests without one, by class


def activity(scheduler: Scheduler, now: float) -> Activity:
    """Return what an instance does. Call it on the thread of the scheduler."""
    running, waiting = Counter[str](), Counter[str]()
    for request in scheduler:
        if request.state is not State.FINISHED:
            (waiting if request.slot is None else running)[request.class_] += 1
    oldest = scheduler.oldest
    if oldest is None:
        return Activity(None, running, waiting)
    behind = scheduler.predicted if scheduler.in_flight > 1 else 0.0  # of the step planned after it
    left = scheduler.ends - behind - now
    return Activity(RunningStep(oldest.load.prefill, oldest.load.decode, oldest.seconds, left), running, waiting)
