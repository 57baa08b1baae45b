"""A small simulated cluster for tests: real schedulers, cores and KV transfers in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxserve.sched import admission, policies, routing
from jaxserve.sched.api.errors import InvalidValue, Unavailable
from jaxserve.sched.api.executor import Step
from jaxserve.sched.api.kv_source import KVSource
from jaxserve.sched.api.log import Log, no_log
from jaxserve.sched.api.new_request import STANDARD, NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import UNAVAILABLE, Delta, KVBuffer, StepPlan, StepResult
from jaxserve.sched.api.policy import Limits, Policy, Role
from jaxserve.sched.api.preemption import stopping
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.cluster.cluster import Cluster, Instance
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.instance.stats import Counters
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.sim import clock
from jaxserve.sched.sim.clock import EVENT
from jaxserve.sched.sim.executor import EOS, Device, SimExecutor
from jaxserve.sched.sim.tiers import Tiers

KV_BYTES = 100_000  # of a token
LIMIT = 1e5  # virtual seconds after which a run counts as stuck
COEFFICIENTS = Coefficients(fixed=1e-3, prefill=5e-5, decode=1e-5, quadratic=1e-8, longest=1e-7, context=1e-8)


@dataclass
class Job:
    """A request to serve; `output` counts its tokens including the end-of-sequence token."""

    prompt: Sequence[int]
    output: int
    arrival: float = 0.0
    slo: SLO = field(default_factory=SLO)
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=None))
    cancel_at: float | None = None
    tier: str = STANDARD
    session: str = ""


@dataclass
class Outcome:
    requests: list[Request]
    deltas: dict[int, list[Delta]]
    plans: list[tuple[str, StepPlan]]
    ended: float
    counters: dict[str, Counters]


class Flaky(SimExecutor):
    """A simulated executor with failing transfers, delayed steps and transfers, and held requests, as the test says."""

    def __init__(
        self,
        loses: Callable[[], bool],
        late: Callable[[StepPlan], float],
        slow: Callable[[], float],
        held: float,
        *args: Any,
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        self._loses = loses
        self._late = late
        self._slow = slow
        self._held = held
        self._barred: dict[int, asyncio.Future[None]] = {}  # by slot: held requests
        self._one_step = set[int]()  # slots of requests that may be in one submitted step at a time

    def submit(self, plan: StepPlan) -> Step:
        self._drop([span.slot for span in plan.spans if span.begin is not None])
        barred = [span for span in plan.spans if span.slot in self._barred]
        assert not barred, f"step {plan.step} contains {barred}, which are held"
        twice = [span for span in plan.spans if span.slot in self._one_step and self._has(span.slot)]
        assert not twice, f"step {plan.step} contains {twice}, which the step before holds"
        return super().submit(plan)

    def _result(self, job: Any) -> StepResult:
        result = super()._result(job)
        if not self._held:
            return result
        held = []
        for at, span in enumerate(job.plan.spans):
            self._one_step.discard(span.slot)
            if result.tokens[at] and (span.request + span.start // 2) % 3 == 0:
                held.append(at)
                self._one_step.add(span.slot)
        return result._replace(held=frozenset(held))

    def _has(self, slot: int) -> bool:
        submitted = [self._running, *self._queue]
        return any(span.slot == slot for job in submitted if job is not None for span in job.plan.spans)

    def unheld(self, slot: int) -> asyncio.Future[None]:
        assert not self._has(slot)
        unheld: asyncio.Future[None] = self._loop.create_future()

        def unhold() -> None:
            if self._barred.get(slot) is unheld:
                del self._barred[slot]
                unheld.set_result(None)

        self._barred[slot] = unheld
        self._loop.at(self._loop.now + self._held, EVENT, unhold)
        return unheld

    def _drop(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if (unheld := self._barred.pop(slot, None)) is not None:
                unheld.cancel()
        self._one_step.difference_update(slots)

    def release(self, slots: Sequence[int]) -> None:
        self._drop(slots)
        super().release(slots)

    def rebuild(self) -> None:
        self._drop([*self._barred, *self._one_step])
        super().rebuild()

    def _begin(self, job: Any) -> None:
        job.seconds += self._late(job.plan)
        super()._begin(job)

    async def import_kv(self, kv_buffer: KVBuffer, pages: Sequence[int]) -> None:
        await super().import_kv(kv_buffer, pages)
        if (slow := self._slow()) > 0:
            await asyncio.sleep(slow)
        if self._loses():
            raise OSError("injected: the link went down")


@dataclass
class SimSetup:
    """The cluster that serves the jobs."""

    roles: Sequence[Role]
    policy: str | Callable[[], Policy] = "distserve"
    pages: int = 64
    page_size: int = 4
    rows: int = 8
    tokens: int = 32
    prompts: int = 1 << 30
    preemptible: bool = False
    segments: int = 8  # of a preemptible step
    suspended: int = 4
    lead: float = 0.0  # seconds before a step's predicted end at which the next is planned
    coefficients: Coefficients = COEFFICIENTS
    draft: int = 0
    cascade: bool = False
    acceptance: float = 0.0  # chance that a drafted token is right
    routing: str = "least_work"
    admission: str = "none"
    prefix_caching: bool = True
    first_token: str = "prefill"
    fails: Callable[[str, StepPlan], bool] = lambda name, plan: False
    loses: Callable[[], bool] = lambda: False  # whether the next transfer raises
    late: Callable[[str, StepPlan], float] = lambda name, plan: 0.0  # seconds added to a step
    slow: Callable[[], float] = lambda: 0.0  # seconds added to the next transfer
    held: float = 0.0  # seconds for which some requests are held after some of their tokens; 0: none is
    rest: float = 60.0  # virtual seconds after the last request for surplus steps and transfers to end
    watch: Callable[[Cluster], None] = lambda cluster: None  # called with the cluster before it runs
    role_changes: Sequence[tuple[float, Mapping[int, Role]]] = ()  # times and roles of the instances to change
    log: Callable[[str], Log] = lambda name: no_log
    sources: Sequence[KVSource] = ()
    tiers: Tiers = field(default_factory=Tiers)  # besides `sources`
    scheduler: Callable[..., Scheduler] = Scheduler

    def limits(self) -> Limits:
        return Limits(
            self.tokens, self.rows, self.pages, self.page_size, self.prompts, preemptible=self.preemptible,
            suspended=self.suspended, stopping=stopping(self.segments), draft=self.draft, cascade=self.cascade,
        )  # fmt: skip


def every(count: int, until: int = 40) -> Callable[[str, StepPlan], bool]:
    """Return a function for `fails` that lets every `count`-th step before `until` raise."""
    steps = [0]

    def fails(name: str, plan: StepPlan) -> bool:
        steps[0] += 1
        return steps[0] % count == 0 and steps[0] < until

    return fails


def simulate(jobs: Sequence[Job], roles: Sequence[Role] = (Role.MIXED,), **shape: Any) -> Outcome:
    """Run jobs to their end and check at every step the laws that can be checked there."""
    return clock.run(_simulate(jobs, SimSetup(roles, **shape)))


async def _simulate(jobs: Sequence[Job], shape: SimSetup) -> Outcome:
    loop = clock.loop()
    plans: list[tuple[str, StepPlan]] = []
    over: list[Request] = []
    outputs = {index: job.output for index, job in enumerate(jobs)}
    instances = _instances(shape, outputs, plans, loop)
    admits = admission.make(shape.admission)
    place = routing.make(shape.routing, admits)
    tiers = shape.tiers.make(Device(shape.pages, shape.page_size, KV_BYTES), loop)
    beyond: dict[str, Any] = {"sources": (*shape.sources, *tiers), "store": tiers[0] if tiers else None}
    cluster = Cluster(instances, place, admits, first_token=shape.first_token, finished=over.append, **beyond)
    deltas: dict[int, list[Delta]] = {index: [] for index in range(len(jobs))}

    def arrive(id: int, job: Job) -> None:
        asked = NewRequest(job.prompt, job.params, job.slo, tier=job.tier, session=job.session)
        request = Request(id, asked, loop.now, eos=frozenset([EOS]), seed=id)
        try:
            cluster.submit(request, deltas[id].append)
        except Unavailable as error:
            request.finish_reason, request.error = UNAVAILABLE, str(error)
            over.append(request)

    def set_roles(roles: Mapping[int, Role]) -> None:
        before = [core.scheduler.role for core in cluster.cores]
        try:
            cluster.set_roles(roles)
        except InvalidValue:
            assert [core.scheduler.role for core in cluster.cores] == before
        cluster.check()

    shape.watch(cluster)
    machine = asyncio.create_task(cluster.run())
    await asyncio.sleep(0)
    for at, roles in shape.role_changes:
        loop.at(at, 1, set_roles, roles)
    for id, job in enumerate(jobs):
        loop.at(job.arrival, 0, arrive, id, job)
        if job.cancel_at is not None:
            loop.at(max(job.cancel_at, job.arrival), 1, cluster.cancel, id)
    await asyncio.sleep(max((job.arrival for job in jobs), default=0.0))
    await asyncio.sleep(0)
    drained = asyncio.create_task(cluster.drained())
    await asyncio.wait([machine, drained], timeout=LIMIT, return_when=asyncio.FIRST_COMPLETED)
    if machine.done():
        machine.result()
    assert drained.done(), f"unfinished at {loop.now}: {[list(core.scheduler) for core in cluster.cores]}"
    await asyncio.sleep(shape.rest)  # surplus steps and transfers end
    cluster.check()
    for core in cluster.cores:
        assert len(core.scheduler) == 0 and core.scheduler.blocks.held == 0
    assert len(cluster.kv_transfers) == 0 and len(cluster.prefix_fetch) == 0
    machine.cancel()
    await asyncio.wait([machine])
    counters = {core.name: core.scheduler.counters for core in cluster.cores}
    return Outcome(sorted(over, key=lambda request: request.id), deltas, plans, loop.now, counters)


def _instances(
    shape: SimSetup, outputs: Mapping[int, int], plans: list[tuple[str, StepPlan]], loop: clock.VirtualLoop
) -> list[Instance]:
    last = [0.0]
    instances = []

    def watch(name: str, plan: StepPlan, result: StepResult) -> None:
        plans.append((name, plan))
        assert result.finished >= last[0], "the clock ran backward"
        last[0] = result.finished
        assert len(plan.spans) <= shape.rows and sum(span.length for span in plan.spans) <= shape.tokens
        assert len({span.request for span in plan.spans}) == len(plan.spans)

    for index, role in enumerate(shape.roles):
        name = f"{role.value}{index}"
        scheduler = shape.scheduler(
            policies.make(shape.policy) if isinstance(shape.policy, str) else shape.policy(),
            GeneralModel(shape.coefficients),
            shape.limits(),
            role,
            prefix_caching=shape.prefix_caching,
            log=shape.log(name),
        )
        executor = Flaky(
            shape.loses,
            partial(shape.late, name),
            shape.slow,
            shape.held,
            GeneralModel(shape.coefficients, correct=False),
            Device(
                shape.pages,
                shape.page_size,
                kv_bytes_per_token=KV_BYTES,
                segments=shape.segments,
                acceptance=shape.acceptance,
            ),
            outputs,
            loop,
            watch=partial(watch, name),
            fails=partial(shape.fails, name),
        )
        executor.lead = shape.lead
        instances.append(Instance(name, scheduler, executor))
    return instances
