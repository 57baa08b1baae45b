"""A record of a simulation or of a replay, from which timelines and the lives of requests are made."""

from __future__ import annotations

from collections.abc import Callable, Container
from math import inf
from typing import Any, NamedTuple

from ..api.log import Log
from ..api.plan import StepPlan, StepResult, Suspended
from ..api.policy import Limits
from ..api.request import Request
from ..instance.scheduler import Scheduler
from ..instance.slack import least_slack


class Stretch(NamedTuple):
    """A step, or the part of it that ran until it was stopped at a segment boundary."""

    instance: str
    plan: StepPlan
    start: float  # seconds
    end: float
    stopped: bool  # at a segment boundary: its spans are not complete


class Placed(NamedTuple):
    """The assignment of a request to an instance, with the queue it found there."""

    at: float
    instance: str
    request: int
    waiting: int  # requests without pages
    backlog: int  # prompt tokens still to compute


class Moved(NamedTuple):
    """The migration of a request with its KV to another instance that had reserved pages."""

    at: float
    request: int
    source: str
    target: str
    reserved: float  # when the pages were reserved


class Demoted(NamedTuple):
    """When and why a request became best effort. Seconds."""

    at: float
    instance: str
    request: int
    due: float | None = None  # until the deadline of its next token; None: admission control did it, on arrival
    needs: float = 0.0  # until this token, if nothing else had run


def demoted_on_arrival(request: Request, at: float, instance: str) -> Demoted | None:
    """Return the demotion by admission control of a request that is placed for the first time; None if it had none."""
    return Demoted(at, instance, request.id) if request.best_effort == 1 else None


class Level(NamedTuple):
    """The state of an instance when it planned a step."""

    at: float
    instance: str
    pages: int  # held
    waiting: int  # requests without pages
    running: int  # requests with a slot
    kv_waiting: int  # requests elsewhere that wait for pages here
    backlog: int = 0  # prompt tokens still to compute
    slack: float = inf  # seconds by which no next token would be late; inf too if not recorded


class RoleFrom(NamedTuple):
    """The role that an instance has from a time on."""

    at: float  # -inf: from the start
    instance: str
    role: str


class Recorder:
    """The record of a simulation or a replay that it is passed to. Writer: the schedulers' logs."""

    def __init__(self, slack: bool = False) -> None:
        """slack: whether to record the slack of instances, which takes about a tenth of a simulation's time."""
        self._slack = slack
        self.limits: dict[str, Limits] = {}
        self.requests: dict[int, Request] = {}  # all that arrived, in their current state
        self.predicted: dict[int, float] = {}  # seconds to the first tokens, at the last placement
        self.stretches: list[Stretch] = []
        self.placed: list[Placed] = []
        self.moves: list[Moved] = []
        self.demoted: dict[int, Demoted] = {}
        self.levels: list[Level] = []
        self.roles: list[RoleFrom] = []
        self.hidden: Container[int] = ()  # requests that `explain` does not name
        self._schedulers: dict[str, Scheduler] = {}
        self._reserved: dict[int, float] = {}
        self._sources: dict[int, str] = {}

    def instance(self, name: str, limits: Limits, now: Callable[[], float], then: Log) -> Log:
        """Return the log of one instance. It passes all entries on to `then`."""
        self.limits[name] = limits
        plans: dict[int, StepPlan] = {}

        def log(kind: str, **fields: Any) -> None:
            then(kind, **fields)
            if kind == "plan":
                self._level(name, now())
            elif kind == "planned":
                plans[fields["plan"].step] = fields["plan"]
            elif kind in ("settle", "suspend"):
                self._stretch(name, plans, fields["result"])
            elif kind == "recover":
                plans.clear()
            elif kind == "set_role":
                self.roles.append(RoleFrom(now(), name, fields["role"]))
            elif kind == "add":
                self._place(name, now(), fields["request"], fields["predicted"])
            elif kind == "demoted":
                id = fields["id"]
                self.demoted[id] = Demoted(now(), name, id, fields["due"], fields["needs"])
            elif kind == "reserve":
                self._reserved[fields["id"]] = now()  # repeated until there is room: the last one counts
            elif kind == "release":
                self._sources[fields["id"]] = name
            elif kind == "accept":
                id = fields["id"]
                self.moves.append(Moved(now(), id, self._sources[id], name, self._reserved[id]))

        return log

    def attach(self, name: str, scheduler: Scheduler) -> None:
        """Set the scheduler of an instance, to record its pages and queues."""
        self._schedulers[name] = scheduler
        self.roles.append(RoleFrom(-inf, name, scheduler.role.value))

    def _level(self, name: str, now: float) -> None:
        scheduler = self._schedulers[name]
        slack = least_slack([(max(now, scheduler.ends), scheduler)]) if self._slack else inf
        counts = scheduler.blocks.held, scheduler.waiting, scheduler.running, scheduler.kv_waiting
        self.levels.append(Level(now, name, *counts, scheduler.prefill_backlog, slack))

    def _stretch(self, name: str, plans: dict[int, StepPlan], result: StepResult | Suspended) -> None:
        stopped = isinstance(result, Suspended)
        end = result.at if isinstance(result, Suspended) else result.finished
        self.stretches.append(Stretch(name, plans.pop(result.step), result.started, end, stopped))

    def _place(self, name: str, now: float, request: Request, predicted: float | None) -> None:
        scheduler = self._schedulers[name]
        if predicted is not None:
            self.predicted[request.id] = predicted
        if request.id not in self.demoted and (demoted := demoted_on_arrival(request, now, name)) is not None:
            self.demoted[request.id] = demoted
        self.placed.append(Placed(now, name, request.id, scheduler.waiting, scheduler.prefill_backlog))
