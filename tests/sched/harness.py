"""A small simulated cluster for tests: real schedulers, cores and hand-overs, virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxserve.sched import placement, policies
from jaxserve.sched.cluster import Cluster, Instance
from jaxserve.sched.log import Log, no_log
from jaxserve.sched.params import SamplingParams
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.plan import Delta, StepPlan, StepResult
from jaxserve.sched.policy import Limits, Role
from jaxserve.sched.request import Request
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.sim import clock
from jaxserve.sched.sim.executor import EOS, Device, SimExecutor
from jaxserve.sched.slo import SLO

COEFFICIENTS = Coefficients(fixed=1e-3, prefill=5e-5, decode=1e-5, quadratic=1e-8, longest=1e-7, context=1e-8)


@dataclass
class Job:
    """A request to be: `output` counts its tokens, the end-of-sequence one included."""

    prompt: Sequence[int]
    output: int
    arrival: float = 0.0
    slo: SLO = field(default_factory=SLO)
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=None))
    cancel_at: float | None = None


@dataclass
class Outcome:
    requests: list[Request]
    deltas: dict[int, list[Delta]]
    plans: list[tuple[str, StepPlan]]
    ended: float


def simulate(
    jobs: Sequence[Job],
    roles: Sequence[Role] = (Role.MIXED,),
    *,
    policy: str = "distserve",
    pages: int = 64,
    page_size: int = 4,
    rows: int = 8,
    tokens: int = 32,
    prefix_caching: bool = True,
    first_token: str = "prefill",
    fails: Callable[[str, StepPlan], bool] = lambda name, plan: False,
    log: Callable[[str], Log] = lambda name: no_log,
    limit: float = 1e5,
) -> Outcome:
    """Run jobs to their end; every law that can be checked at every step is checked."""

    async def main() -> Outcome:
        loop = clock.loop()
        outputs = {index: job.output for index, job in enumerate(jobs)}
        plans: list[tuple[str, StepPlan]] = []
        instances, times = [], [0.0]

        def watch(name: str) -> Callable[[StepPlan, StepResult], None]:
            def seen(plan: StepPlan, result: StepResult) -> None:
                plans.append((name, plan))
                assert result.started >= 0 and result.finished >= times[-1], "the clock ran backwards"
                times.append(result.finished)
                assert len(plan.spans) <= rows and sum(span.length for span in plan.spans) <= tokens
                assert len({span.request for span in plan.spans}) == len(plan.spans)

            return seen

        for index, role in enumerate(roles):
            name = f"{role.value}{index}"
            scheduler = Scheduler(
                policies.make(policy),
                GeneralModel(COEFFICIENTS),
                Limits(tokens, rows, pages, page_size),
                role,
                prefix_caching=prefix_caching,
                log=log(name),
            )
            executor = SimExecutor(
                GeneralModel(COEFFICIENTS, correct=False),
                Device(pages, page_size, kv_bytes_per_token=100_000),
                outputs,
                loop,
                watch=watch(name),
                fails=lambda plan, name=name: fails(name, plan),
            )
            instances.append(Instance(name, scheduler, executor))
        over: list[Request] = []

        def finished(request: Request) -> None:
            over.append(request)

        cluster = Cluster(instances, placement.make("least_work"), first_token=first_token, finished=finished)
        deltas: dict[int, list[Delta]] = {index: [] for index in range(len(jobs))}

        def arrive(id: int, job: Job) -> None:
            request = Request(id, job.prompt, job.params, job.slo, loop.now, eos=frozenset([EOS]), seed=id)
            cluster.submit(request, deltas[id].append)

        import asyncio

        machine = asyncio.create_task(cluster.run())
        await asyncio.sleep(0)
        for id, job in enumerate(jobs):
            loop.at(job.arrival, 0, arrive, id, job)
            if job.cancel_at is not None:
                loop.at(max(job.cancel_at, job.arrival), 1, cluster.cancel, id)
        last = max((job.arrival for job in jobs), default=0.0)
        await asyncio.sleep(last)
        await asyncio.sleep(0)
        drained = asyncio.create_task(cluster.drained())
        await asyncio.wait([machine, drained], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if machine.done():
            machine.result()
        assert drained.done(), f"not finished at {loop.now}: {[list(core.scheduler) for core in cluster.cores]}"
        await asyncio.sleep(60.0)  # surplus steps and moves end
        cluster.check()
        for core in cluster.cores:
            assert len(core.scheduler) == 0 and core.scheduler.blocks.held == 0
        assert len(cluster.mover) == 0
        machine.cancel()
        await asyncio.wait([machine])
        return Outcome(sorted(over, key=lambda request: request.id), deltas, plans, loop.now)

    return clock.run(main())
