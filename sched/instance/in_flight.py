"""The unfinished steps of an instance: submitted to the executor, or suspended at a segment boundary."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from ..api.perf import Load
from ..api.plan import StepPlan, StepResult, Suspended
from ..api.policy import Task
from ..api.request import Request, State


class Submitted:
    """A step without a result yet. Writer: the InFlightSteps that holds it."""

    __slots__ = ("asked", "load", "plan", "ran", "seconds")

    def __init__(self, plan: StepPlan, load: Load, seconds: float) -> None:
        self.plan = plan
        self.load = load
        self.seconds = seconds  # predicted, for the whole step
        self.ran = 0.0  # seconds it ran before it was suspended
        self.asked: float | None = None  # when it was asked to stop

    @property
    def left(self) -> float:
        """Predicted seconds to compute when it last began or resumed."""
        return max(0.0, self.seconds - self.ran)


class InFlightSteps:
    """The submitted steps, oldest first, and the suspended steps. Writer: the Scheduler."""

    def __init__(self) -> None:
        self._submitted: deque[Submitted] = deque()
        self._suspended: dict[int, Submitted] = {}  # by step number

    def __len__(self) -> int:
        """Return the number of submitted steps."""
        return len(self._submitted)

    @property
    def oldest(self) -> Submitted | None:
        """The step with the next result."""
        return self._submitted[0] if self._submitted else None

    @property
    def newest(self) -> Submitted | None:
        return self._submitted[-1] if self._submitted else None

    @property
    def suspended(self) -> Mapping[int, Submitted]:
        return self._suspended

    def submit(self, plan: StepPlan, load: Load, seconds: float) -> None:
        self._submitted.append(Submitted(plan, load, seconds))

    def land(self, result: StepResult | Suspended) -> Submitted:
        """Remove and return the oldest submitted step, to which this result belongs."""
        submitted = self._submitted.popleft()
        if submitted.plan.step != result.step:
            raise AssertionError(f"step {result.step} came back before step {submitted.plan.step}")
        return submitted

    def suspend(self, result: Suspended) -> Submitted:
        """Move the oldest submitted step to the suspended ones."""
        submitted = self.land(result)
        submitted.ran += result.at - result.started
        self._suspended[result.step] = submitted
        return submitted

    def resume(self, step: int, number: int) -> StepPlan:
        """Resubmit the suspended step `step` under the new number `number`."""
        submitted = self._suspended.pop(step)
        submitted.plan = StepPlan(number, submitted.plan.spans, preemptible=True, resume=step)
        self._submitted.append(submitted)
        return submitted.plan

    def clear(self) -> None:
        self._submitted.clear()
        self._suspended.clear()

    def tasks(self, requests: Mapping[int, Request]) -> tuple[Task, ...]:
        """Return the suspended steps, as policies see them."""
        return tuple(task(step, step.left, requests) for step in self._suspended.values())


def task(submitted: Submitted, left: float, requests: Mapping[int, Request], since: float = 0.0) -> Task:
    alive = (requests[span.request] for span in submitted.plan.spans)
    requests_left = tuple(request for request in alive if request.state is not State.FINISHED)
    return Task(submitted.plan.step, requests_left, left, submitted.seconds, since)
