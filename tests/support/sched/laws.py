"""Laws of every run under any policy, checked from inside at every event."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from jaxserve.sched import policies
from jaxserve.sched.api.log import Log
from jaxserve.sched.api.perf import Form, PerfModel
from jaxserve.sched.api.plan import Span
from jaxserve.sched.api.policy import Decision, Policy, QueueView, Role, Task, View
from jaxserve.sched.api.request import BEST_EFFORT, Request, RequestView, State
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.sim import clock
from tests.support.sched.cases import MESHES, Case
from tests.support.sched.complete import check_complete
from tests.support.sched.harness import Job, Outcome, simulate

Record = tuple[float, str, str, Any]  # time, instance, kind, value


def names_of(*protocols: type) -> frozenset[str]:
    """Return the names that the protocols of the seam offer."""
    return frozenset(name for one in protocols for name in vars(one) if not name.startswith("_"))


REQUEST = names_of(RequestView)
ROWS = names_of(QueueView)
MODEL = names_of(Form, PerfModel) - {"observe"}  # only the scheduler may train the model


class Sealed:
    """A proxy that exposes only what a protocol offers and fails on everything else."""

    __slots__ = ("_allowed", "_one")

    def __init__(self, one: Any, allowed: frozenset[str]) -> None:
        object.__setattr__(self, "_one", one)
        object.__setattr__(self, "_allowed", allowed)

    def __getattr__(self, name: str) -> Any:
        assert name in self._allowed, f"a policy accesses {name!r} of {self._one!r}"
        return getattr(self._one, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError(f"a policy writes {name!r} of {self._one!r}")


class SealedRows(Sealed):
    """Rows of sealed requests."""

    __slots__ = ()

    def __init__(self, rows: QueueView) -> None:
        super().__init__(rows, ROWS)

    def __len__(self) -> int:
        return len(self._one)

    def __iter__(self) -> Iterator[Sealed]:
        return (Sealed(one, REQUEST) for one in self._one)

    def __getitem__(self, row: int) -> Sealed:
        return Sealed(self._one[row], REQUEST)


def sealed(view: View) -> Any:
    """Return a view that exposes only what the protocols offer."""

    def task(one: Task) -> Any:
        return one._replace(requests=tuple(Sealed(request, REQUEST) for request in one.requests))

    changed: dict[str, Any] = {
        "prefill": SealedRows(view.prefill),
        "decode": SealedRows(view.decode),
        "perf": Sealed(view.perf, MODEL),
        "suspended": tuple(map(task, view.suspended)),
        "running": None if view.running is None else task(view.running),
    }
    return replace(view, **changed)


class RecordingPolicy:
    """A policy wrapper that records the last decision about what to run. Writer of `named`."""

    def __init__(self, policy: Policy, seal: bool) -> None:
        self._policy = policy
        self._seal = seal
        self.named: list[int] = []

    def decide(self, view: View) -> Decision:
        decision = self._policy.decide(sealed(view) if self._seal else view)
        if view.running is None:
            self.named = [grant.request for grant in decision.grants]
        return decision


class Watch:
    """A recorder of the instances' logs of one run that checks the invariants at every event."""

    def __init__(self, policy: str, *, seal: bool) -> None:
        self.records: list[Record] = []
        self._policy = policy
        self._seal = seal
        self._instances: list[Scheduler] = []
        self._now = 0.0

    def run(self, jobs: Sequence[Job], roles: Sequence[Any], **shape: Any) -> Outcome:
        jump = clock.VirtualLoop._jump

        def watched(loop: clock.VirtualLoop) -> None:
            self.check(loop.now)
            jump(loop)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clock.VirtualLoop, "_jump", watched)
            more = {"policy": self._make, "log": self._log, "scheduler": self._scheduler}
            return simulate(jobs, roles, **{**shape, **more})

    def _make(self) -> RecordingPolicy:
        return RecordingPolicy(policies.make(self._policy), self._seal)

    def _scheduler(self, *args: Any, **more: Any) -> Scheduler:
        self._instances.append(Scheduler(*args, **more))
        return self._instances[-1]

    def _log(self, name: str) -> Log:
        def log(kind: str, **fields: Any) -> None:
            if kind in ("planned", "settle", "suspend", "accept"):
                what = next(iter(fields.values()))
                self.records.append((clock.loop().now, name, kind, what))

        return log

    def check(self, now: float) -> None:
        assert now >= self._now, "the clock ran backward"
        self._now = now
        for one in self._instances:
            one.check()
            assert 0 <= one.blocks.held <= one.limits.pages and 0 <= one.running <= one.limits.rows
            if not one.in_flight:
                idle(one, now)


def idle(one: Scheduler, now: float) -> None:
    """Check that an instance idles only if no request in it can run.

    No step may be suspended, no request that holds pages may have all the pages it needs, and the
    first request in the policy's order without pages must not fit (best effort comes last in any
    order). A policy may leave rows out (shedding, delaying) only beside others that run.
    """
    view = one.view(now, now)
    assert not view.suspended, f"idle at {now} with suspended steps"
    running = (each for each in one if each.state is State.RUNNING and each.generated < each.limit)
    holders = [each for each in running if not each.held]
    stuck = [each for each in holders if len(each.pages) * one.limits.page_size <= each.computed]
    assert not holders or (len(stuck) == len(holders) == 1 and not one.blocks.available), f"idle at {now}: {holders}"
    waiting = {each.id: each for each in one if each.state is State.WAITING}
    if waiting:
        policy = one.policy
        assert isinstance(policy, RecordingPolicy)
        wanted = [waiting[id] for id in policy.named if id in waiting]
        first = min(
            wanted, key=lambda each: each.tier == BEST_EFFORT, default=None
        )  # best effort comes last in any order
        assert first is not None, f"idle at {now}: the policy wants none of {list(waiting.values())}"
        assert not _fits(one, first), f"idle at {now}: {first} fits"


def _fits(one: Scheduler, request: Request) -> bool:
    """Return whether the request would get its pages, even without a prefix hit, and a slot."""
    slots = one.limits.rows - one.running - len(one._reservations)
    pages = one.blocks.count(request.known) + len(one.view(0.0, 0.0).decode)
    return slots > 0 and pages <= one.blocks.available


def spans_in_order(records: Sequence[Record]) -> dict[int, list[tuple[float, Span]]]:
    """Return each request's settled spans with their end times."""
    plans = {(name, what.step): what for _, name, kind, what in records if kind == "planned"}
    found: dict[int, list[tuple[float, Span]]] = {}
    for _, name, kind, result in records:
        if kind == "settle":
            for span in plans[name, result.step].spans:
                found.setdefault(span.request, []).append((result.finished, span))
    return found


def check_tokens(outcome: Outcome, records: Sequence[Record], page_size: int) -> None:
    """Check that no token is computed before all tokens before it.

    Spans follow each other, and only the last span of a prompt samples. A restarted request begins
    at a page that a cache may hold, or where another instance stopped.
    """
    spans = spans_in_order(records)
    for request in outcome.requests:
        at, drafted = 0, 0
        for place, (finished, span) in enumerate(spans.get(request.id, ())):
            if span.begin is None:
                assert at - drafted <= span.start <= at, f"{request}: {span} does not start at {at}"
            else:
                assert span.start % page_size == 0 or at - drafted <= span.start <= at
            at, drafted = span.start + span.length, span.draft
            assert not span.samples or at > request.prompt_length - 1
            if span.samples and not any(one.samples for _, one in spans[request.id][:place]) and request.token_times:
                assert request.token_times[0] >= finished
        assert not request.output or at >= request.prompt_length


def check_laws(
    policy: str,
    case: Case,
    jobs: Sequence[Job],
    shape: Mapping[str, Any],
    *,
    changes: Sequence[tuple[float, Mapping[int, Role]]] = (),
    faults: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Check all laws of a run, and that an equal run, whose policy is sealed, has an equal history.

    changes: of roles. faults: Makes what fails in a run, anew for each.
    """
    mesh, routing, admission = case
    histories = []
    for seal in (False, True):
        watch = Watch(policy, seal=seal)
        setup = {"routing": routing, "admission": admission, "role_changes": changes, **faults(), **shape}
        outcome = watch.run(jobs, MESHES[mesh], **setup)
        check_complete(outcome, jobs, refuses=admission.endswith(":refuse"))
        check_tokens(outcome, watch.records, page_size=4)
        histories.append((watch.records, outcome.ended, [one.token_times for one in outcome.requests]))
    assert histories[0] == histories[1]


def first_difference(one: Outcome, other: Outcome) -> float:
    """Return the first time in seconds at which the requests' output lengths differ in either run."""
    shows = inf
    for request, same in zip(one.requests, other.requests, strict=True):
        last = min(len(request.output), len(same.output))
        if last and len(request.output) != len(same.output):
            shows = min(shows, request.token_times[last - 1], same.token_times[last - 1])
    return shows
