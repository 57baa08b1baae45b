"""One simulation: the serving Cluster on simulated devices in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from .. import admission as admissions
from .. import policies, routing
from ..admission.base import Admission
from ..api.errors import InvalidValue, PolicyError
from ..api.log import Log, no_log
from ..api.new_request import NewRequest
from ..api.params import SamplingParams
from ..api.policy import Decision, Limits, Policy, Role, View
from ..api.preemption import stopping
from ..api.request import Request
from ..api.thinking import ThinkingEnd
from ..cluster.cluster import Cluster, Instance, check_roles
from ..cluster.kv_tier import KVTier
from ..cluster.ttft_predictions import Accuracy
from ..instance.scheduler import Scheduler
from ..instance.stats import Counters
from ..metrics import FINISHED, Measured, Spread, Summary, measure, spread, stage_allowance, summarize
from ..perf.buckets import Padded
from ..recorded.record import Recorder
from ..routing.base import Router
from . import clock
from .executor import END_THINKING, EOS, SimExecutor
from .fronts import Fronts
from .latency import Latency
from .options import DEFAULT, Mesh, Options
from .predict import perf_model
from .scaled import ScaledReplicas
from .stale import Stale
from .workload import Arrival, validate

Progress = Callable[[int, int], None]  # done, total

PROGRESS_EVERY = 10  # requests
LAST = 60  # most simulated seconds after the last request until every page is released


class Drawn(Protocol):
    """A distribution of requests, such as workload.Workload and workload.Mix."""

    @property
    def name(self) -> str: ...
    def draw(self, count: int, rate: float, seed: int) -> list[Arrival]: ...


class Logs(Protocol):
    """A factory of the logs that schedulers write to (journal.py)."""

    def __call__(self, name: str, policy: str, limits: Limits, role: Role, prefix_caching: bool) -> Log: ...


class Timed:
    """A policy with timed decisions. Writer of `seconds`."""

    def __init__(self, policy: Policy, timer: Callable[[], float], seconds: list[float]) -> None:
        self._policy = policy
        self._timer = timer
        self._seconds = seconds

    def decide(self, view: View) -> Decision:
        began = self._timer()
        decision = self._policy.decide(view)
        self._seconds.append(self._timer() - began)
        return decision


class Report(NamedTuple):
    """The results of one simulation."""

    policy: str
    rate: float  # requests per second, as requested or as in the trace
    seed: int
    summary: Summary
    measured: tuple[Measured, ...]
    counters: Counters
    busy: tuple[float, ...]  # share of the time in which each instance computed
    ended: float  # virtual seconds
    instances: tuple[str, ...] = ()  # names, in the order of `busy`
    deflections: int = 0  # prompts assigned to decode instances
    ttft_predictions: Mapping[str, Accuracy] = {}  # of first tokens, by path, if the router makes any
    replica_seconds: float = 0.0  # of virtual time in which replicas started, served or drained
    decisions: Spread | None = None  # real seconds per decision, if Options has a timer


PolicyLike = str | Callable[[], Policy]  # a name, or a factory called once per instance


def policy_name(policy: PolicyLike) -> str:
    """Return the name of a policy in reports."""
    return policy if isinstance(policy, str) else getattr(policy, "__name__", type(policy).__name__)


def simulate(
    workload: Drawn | Sequence[Arrival],
    policy: PolicyLike,
    mesh: Mesh | str,
    latency: Latency,
    seed: int = 0,
    *,
    qps: float | None = None,
    num_requests: int | None = None,
    options: Options = DEFAULT,
    progress: Progress | None = None,
    logs: Logs | None = None,
    recorder: Recorder | None = None,
) -> Report:
    """Simulate a workload from its first arrival to its last token. Equal arguments give equal histories.

    workload: a distribution, from which `num_requests` (default 1000) are drawn at `qps`; or arrivals, of
        which the first `num_requests` are taken, with times stretched to `qps` if given.
    policy: a name, or a factory that is called once per instance.
    recorder: records the run, for a timeline or the life of a request (`sched.recorded`).

    Raises InvalidValue for invalid arguments, and Deadlock if nothing can proceed.
    """
    mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    arrivals, rate = arrivals_of(workload, qps, num_requests, seed)
    validate(arrivals)
    if len(arrivals) <= 2 * options.skip:
        raise InvalidValue(
            f"skip={options.skip} at each end leaves none of the {len(arrivals)} requests: lower it", "skip"
        )
    simulation = _Simulation(arrivals, policy, mesh, latency, seed, options, progress, logs, recorder)
    try:
        cluster, ended = clock.run(simulation.run())
    except clock.Deadlock as error:
        raise clock.Deadlock(f"{error}. A policy that grants none of the requests that wait does this") from error
    measured = tuple(
        measure(request, arrivals[request.id].class_, stage_allowance(request)) for request in simulation.requests
    )
    if len(measured) <= 2 * options.skip:
        raise InvalidValue(
            f"horizon={options.horizon} and skip={options.skip} leave no request: {len(measured)} of {len(arrivals)} "
            "had arrived",
            "horizon",
        )
    counters = Counters.total(core.scheduler.counters for core in cluster.cores)
    busy = tuple(core.scheduler.counters.measured_seconds / ended if ended else 0.0 for core in cluster.cores)
    return Report(
        policy_name(policy),
        rate,
        seed,
        summarize(measured, options.skip),
        measured,
        counters,
        busy,
        ended,
        tuple(core.name for core in cluster.cores),
        cluster.deflections,
        cluster.ttft_predictions.accuracy,
        simulation.replica_seconds(ended),
        spread(simulation.decisions) if options.timer is not None else None,
    )


def _raise(machine: asyncio.Task[None]) -> None:
    """Raise the error of the cluster itself; of several, and of one in a group, what the policy did wrong."""
    try:
        machine.result()
    except BaseExceptionGroup as group:
        failed: BaseException | None = group.subgroup(PolicyError)
        while isinstance(failed, BaseExceptionGroup):
            failed = failed.exceptions[0]
        error = failed or group
        raise error from error.__cause__


def check_mesh(mesh: Mesh, latency: Latency) -> None:
    """Raise InvalidValue if the preset's step times are not those of the mesh's instances."""
    if mesh.tensor_parallel != latency.tensor_parallel:
        raise InvalidValue(
            f"mesh {mesh} has {mesh.tensor_parallel} devices per instance, but latency preset {latency.name} is "
            f"for {latency.tensor_parallel}",
            "mesh",
        )


def arrivals_of(
    workload: Drawn | Sequence[Arrival], qps: float | None, count: int | None, seed: int
) -> tuple[Sequence[Arrival], float]:
    """Return the arrivals that `simulate` serves, and their rate in requests per second. Raises InvalidValue."""
    if not isinstance(workload, Sequence):
        if qps is None:
            raise InvalidValue(f"workload {workload.name} needs a rate: give qps", "qps")
        return workload.draw(1000 if count is None else count, qps, seed), qps
    arrivals = workload[:count]
    if not arrivals:
        raise InvalidValue("workload has no requests; it must have at least one", "workload")
    span = arrivals[-1].time - arrivals[0].time
    rate = (len(arrivals) - 1) / span if span > 0 else 0.0
    if qps is None:
        return arrivals, rate
    if not 0 < qps < float("inf"):
        raise InvalidValue(f"{qps=} must be a positive number of requests per second", "qps")
    return [replace(arrival, time=arrival.time * rate / qps) for arrival in arrivals], qps


class _Simulation:
    """One run. Its state is written only by callbacks in the virtual loop."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        policy: PolicyLike,
        mesh: Mesh,
        latency: Latency,
        seed: int,
        options: Options,
        progress: Progress | None,
        logs: Logs | None,
        recorder: Recorder | None,
    ) -> None:
        check_mesh(mesh, latency)
        self._arrivals = arrivals
        self._policy = policy
        self._roles = mesh.roles
        for at, roles in options.turns:
            if at < 0 or len(roles) != len(self._roles):
                raise InvalidValue(f"turns={at, roles} must be seconds and {len(self._roles)} roles", "turns")
            check_roles(roles)
        self._device = options.device(latency)
        self._truth = latency.solve()
        self._buckets = latency.buckets
        self._seed = seed
        self._options = options
        self._progress = progress
        self._logs = logs
        self._recorder = recorder
        self._outputs = {id: arrival.output_tokens for id, arrival in enumerate(arrivals)}
        self._thoughts = {id: arrival.thinking_tokens for id, arrival in enumerate(arrivals) if arrival.thinking_tokens}
        self._rounds: dict[int, list[int]] = {}  # next rounds by request
        for id, turn in enumerate(arrivals):
            if turn.after is not None:
                self._rounds.setdefault(turn.after, []).append(id)
        caching = options.prefix_caching
        self._caching = any(arrival.hash_ids for arrival in arrivals) if caching is None else caching
        self._over = 0
        self._scaled: ScaledReplicas | None = None
        self.requests: list[Request] = []
        self.decisions: list[float] = []
        self.tiers: list[KVTier] = []

    async def run(self) -> tuple[Cluster, float]:
        self._loop = loop = clock.loop()
        self._done: asyncio.Future[None] = loop.create_future()
        admission = admissions.make(self._options.admission)
        router = self._router(admission)
        instances = [self._instance(index, role, loop, router) for index, role in enumerate(self._roles)]
        self.tiers = self._options.tiers.make(self._device, loop)
        self._cluster = cluster = Cluster(
            instances,
            router,
            admission,
            first_token=self._options.first_token,
            finished=self._finished,
            sources=self.tiers,
            store=self.tiers[0] if self.tiers else None,
            queue_timeout=self._options.queue_timeout,
        )
        if self._options.scaling is not None:
            self._scaled = ScaledReplicas(cluster, self._options.scaling, loop)
        machine = asyncio.create_task(cluster.run(), name="cluster")
        for at, roles in self._options.turns:
            loop.at(at, clock.EVENT, cluster.set_roles, dict(enumerate(roles)))
        self._arrive((id, arrival) for id, arrival in enumerate(self._arrivals) if arrival.after is None)
        waited = self._options.horizon
        await asyncio.wait([machine, self._done], timeout=waited, return_when=asyncio.FIRST_COMPLETED)
        if machine.done():
            _raise(machine)
        ended = loop.now
        if self._done.done():
            for _ in range(LAST):  # let KV transfers complete, and suspended steps whose requests were ended
                await asyncio.sleep(1.0)
                if not any(core.scheduler.blocks.held for core in cluster.cores):
                    break
            self._check(cluster)
        machine.cancel()
        await asyncio.wait([machine])
        return cluster, ended

    def _router(self, admission: Admission) -> Router:
        options = self._options
        name = policies.routing(policy_name(self._policy), options.routing)
        if options.fronts:
            return Fronts([routing.make(name, admission) for _ in range(options.fronts)], options.stale)
        router = routing.make(name, admission)
        return Stale(router, options.stale) if options.stale else router

    def replica_seconds(self, ended: float) -> float:
        """Return the seconds of all replicas until the virtual time `ended`."""
        return len(self._roles) * ended if self._scaled is None else self._scaled.seconds(ended)

    def _instance(self, index: int, role: Role, loop: clock.VirtualLoop, router: Router) -> Instance:
        name, options = f"{role.value}{index}", self._options
        limits = Limits(
            options.tokens,
            options.rows,
            self._device.pages,
            self._device.page_size,
            options.prompts or Limits().prompts,
            preemptible=options.boundary != "chunk",
            suspended=options.suspended,
            stopping=stopping(self._device.segments),
            stop_within=options.stop_within,
            draft=options.draft,
            stairs=self._buckets.mixed if options.fill else (),
            cascade=options.cascade,
            mixed_share=router.mixed_share,
        )
        log: Log = no_log
        if self._logs is not None:
            log = self._logs(name, policy_name(self._policy), limits, role, self._caching)
        if self._recorder is not None:
            log = self._recorder.instance(name, limits, lambda: loop.now, log)
        scheduler = Scheduler(
            self._new_policy(),
            perf_model(
                options.perf,
                self._truth,
                self._seed,
                options.prediction_error,
                limits=limits,
                buckets=self._buckets,
            ),
            limits,
            role,
            prefix_caching=self._caching,
            log=log,
        )
        if self._recorder is not None:
            self._recorder.attach(name, scheduler)
        executor = SimExecutor(
            Padded(self._truth, self._buckets),
            self._device,
            self._outputs,
            loop,
            thoughts=self._thoughts,
            seed=(self._seed, index),
        )
        return Instance(name, scheduler, executor)

    def _new_policy(self) -> Policy:
        policy = policies.make(self._policy) if isinstance(self._policy, str) else self._policy()
        timer = self._options.timer
        return policy if timer is None else Timed(policy, timer, self.decisions)

    def _arrive(self, left: Iterator[tuple[int, Arrival]]) -> None:
        """Set the timer of the next arrival. Only one is set at a time, which keeps them in order."""
        coming = next(left, None)
        if coming is None:
            return
        id, arrival = coming

        def arrive() -> None:
            self._submit(id, arrival.time)
            self._arrive(left)

        self._loop.at(arrival.time + self._options.routing_delay, clock.ARRIVAL, arrive)

    def _submit(self, id: int, time: float) -> None:
        request = self._request(id, time)
        if self._scaled is not None:
            self._scaled.arrived(request)
        try:
            self._cluster.submit(request, _ignore)
        except InvalidValue as error:  # the request can never fit
            self._reject(request, str(error))

    def _request(self, id: int, time: float) -> Request:
        arrival = self._arrivals[id]
        request = Request(
            id,
            NewRequest(
                arrival.prompt(id), _PARAMS, arrival.slo, key=arrival.key, session=arrival.session, tier=arrival.tier
            ),
            time,
            eos=_EOS,
            thinking=ThinkingEnd(((END_THINKING,),)) if arrival.thinking_tokens else None,
            seed=id,
        )
        self.requests.append(request)
        if self._recorder is not None:
            self._recorder.requests[id] = request
        return request

    def _reject(self, request: Request, why: str) -> None:
        request.finish_reason, request.error = "rejected", why
        self._finished(request)

    def _finished(self, request: Request) -> None:
        self._over += 1
        total = len(self._arrivals)
        if self._progress is not None and (self._over % PROGRESS_EVERY == 0 or self._over == total):
            self._progress(self._over, total)
        for id in self._rounds.get(request.id, ()):
            self._next_round(id, request)
        if self._over == total and not self._done.done():
            self._done.set_result(None)

    def _next_round(self, id: int, before: Request) -> None:
        """Schedule the next round after the last token of a request, or reject it if the request failed."""
        arrival = self._arrivals[id]
        time = self._loop.now + arrival.delay
        if before.finish_reason in FINISHED:
            self._loop.at(time + self._options.routing_delay, clock.ARRIVAL, self._submit, id, time)
        else:
            self._reject(self._request(id, self._loop.now), "the round before it did not finish")

    def _check(self, cluster: Cluster) -> None:
        """Check conservation: every request has a finish reason, and every page was released."""
        cluster.check()
        lost = [request.id for request in self.requests if request.finish_reason is None]
        held = [core.scheduler.blocks.held for core in cluster.cores]
        assert not lost and not any(held) and not len(cluster), f"{lost=} {held=} {len(cluster)=}"


_PARAMS = SamplingParams(max_tokens=None)
_EOS = frozenset([EOS])


def _ignore(delta: object) -> None:
    """Ignore token deltas: the Request records what the simulation needs."""
