"""One process of a multi-host instance: `python -m tests.support.engine.host CASE` with a `Case` as JSON.

The leader prints one line of JSON: tokens of each request by round, and the number of preemptions.
"""

from __future__ import annotations

import json
import os
import random
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.runtime.host_messages import Segment, encode
from jaxserve.engine.runtime.hosts import Leading, follow
from jaxserve.engine.runtime.segment_pace import SegmentPace
from jaxserve.generation.vectors import pooling_params
from jaxserve.sched.api.errors import StepFailed
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Begin, Span, StepPlan, StepResult
from jaxserve.sched.api.pooling import POOLINGS
from jaxserve.settings.speculative import Speculative
from jaxserve.wire.blocking import BlockingConnection, Listener, connect
from tests.support.engine.mixed import Action, Mixed, jobs_of
from tests.support.engine.steps import GREEDY, PAGE, Job, executors, run

SAMPLED = SamplingParams(temperature=1.0, logprobs=3, prompt_logprobs=2, max_tokens=None)
PENALISED = SamplingParams(temperature=0.9, repetition_penalty=1.3, logit_bias=((5, 2.0),), max_tokens=None)
PROMPTS = [tuple(random.Random(i).choices(range(2, 96), k=9 + 7 * i)) for i in range(4)]
PARAMS = [GREEDY, SAMPLED, PENALISED, GREEDY]
NEW = 4
KEY = b"between the processes of a test"
WRONG, DRAFTS = "wrong index", "drafts"
REPEATED, LONG = (5, 6, 7, 5, 6, 7, 5, 6, 7, 5), 24


@dataclass(frozen=True)
class Case:
    """The configuration of a process."""

    folder: str
    rank: int
    processes: int
    devices: int  # of each process
    meeting: int  # port of jax.distributed
    leader: int  # port of the leader
    boundary: str
    seed: int
    what: str = ""
    wide: int = 32  # largest step, in tokens


def actions(seed: int) -> list[Action]:
    dice = random.Random(seed)
    kinds = ["start", "start", "resume", "decode"]
    return [
        (dice.randrange(4), dice.randint(2, 30), dice.choice([1, 1, 2, 3, None]), dice.choice(kinds)) for _ in range(24)
    ]


def built(case: Case) -> JaxExecutor:
    options: dict[str, Any] = {"warm": False, "persistent_cache": False}
    if case.what == DRAFTS:
        options["speculative"] = Speculative("ngram", 2, prompt_lookup_min=1, prompt_lookup_max=2)
    mesh = f"1x{case.processes * case.devices}"
    (executor,) = executors(
        Path(case.folder), mesh, preempt_boundary=case.boundary, max_num_batched_tokens=case.wide, **options
    )
    assert {device.process_index for device in executor.state.mesh.devices.flat} == set(range(case.processes))
    return executor


def lead(executor: JaxExecutor, case: Case) -> dict[str, Any]:
    told: dict[str, Any] = {"rounds": [], "stops": []}

    async def scenario() -> None:
        for at in range(2):
            mixed = Mixed(executor, jobs_of(PROMPTS, PARAMS), NEW)
            await mixed.play(actions(case.seed + 100 * at))
            told["rounds"].append([job.output for job in mixed.jobs])
            told["stops"].append(mixed.stops)
            await failing(executor)
            executor.state.scrub([1, 2, 3], 1)
        told["pooled"] = await pooled(executor)
        await executor.close()

    run(scenario())
    return told


async def pooled(executor: JaxExecutor) -> list[list[float]]:
    """Return the sums of hidden states of one step, with a request of each kind of pooling."""
    jobs = [Job(PROMPTS[slot], pooling_params(kind), slot=slot) for slot, kind in enumerate(POOLINGS)]
    result = await executor.submit(StepPlan(3, tuple(job.span() for job in jobs)))
    executor.release([job.slot for job in jobs])
    return [result.pooled[index].tolist() for index in range(len(jobs))]


async def failing(executor: JaxExecutor) -> None:
    """Let a device raise while one step is suspended and another has begun; all hosts rebuild the pool."""

    def fault(plan: StepPlan) -> None:
        if plan.step == 2:
            raise RuntimeError("on purpose")

    executor.pace, executor.fault = SegmentPace(1), fault
    step = executor.submit(StepPlan(1, (Job(PROMPTS[3]).span(20),), preemptible=True))
    executor.preempt(step)
    await step
    with suppress(StepFailed):
        await executor.submit(StepPlan(2, (Job(PROMPTS[2], slot=1).span(20),), preemptible=True))
        raise AssertionError("step 2 did not fail")
    executor.fault = None
    executor.rebuild()


def mislead(executor: JaxExecutor, follower: BlockingConnection) -> dict[str, Any]:
    """Tell a follower to dispatch a segment that is not the next."""

    async def scenario() -> str:
        executor.pace = SegmentPace(1)
        step = executor.submit(StepPlan(1, (Job(PROMPTS[3]).span(20),), preemptible=True))
        executor.preempt(step)
        await step
        follower.send(encode(Segment(1, 3, None)))
        assert follower.ready(60)
        try:
            await executor.submit(StepPlan(2, (), preemptible=True, resume=1))
        except StepFailed as error:
            return str(error)
        return "nothing was raised"

    return {"error": run(scenario())}


def speculate(executor: JaxExecutor) -> dict[str, Any]:
    """Run a request that drafts two tokens a step."""

    async def scenario() -> dict[str, Any]:
        output: list[int] = []
        begin = Begin(GREEDY, 0, REPEATED, (), len(REPEATED), ())
        span, held, steps = Span(0, 0, 0, len(REPEATED), (0, 1, 2), REPEATED, 0, True, begin), 3, 0
        while True:
            result = await executor.submit(StepPlan(steps, (span,)))
            assert isinstance(result, StepResult)
            output += result.tokens[0]
            steps += 1
            if len(output) >= LONG:
                break
            at = len(REPEATED) + len(output) - 1
            pages = tuple(range(held, -(-(at + 3) // PAGE)))
            held += len(pages)
            span = Span(0, 0, at, 3, pages, (), 2, True)
        await executor.close()
        return {"output": output[:LONG], "steps": steps}

    return run(scenario())


def main(case: Case) -> None:
    jax.config.update("jax_num_cpu_devices", case.devices)  # type: ignore[no-untyped-call]
    address = "127.0.0.1", case.leader
    if case.rank:
        jax.distributed.initialize(f"127.0.0.1:{case.meeting}", case.processes, case.rank)
        follow(built(case).state, connect(address, KEY))
        return
    listener = Listener(address[0], KEY, address[1])  # before the other processes have met it
    jax.distributed.initialize(f"127.0.0.1:{case.meeting}", case.processes, case.rank)
    plain = built(case)
    followers = [listener.accept() for _ in range(case.processes - 1)]
    leading = Leading(plain.state, followers)
    executor = JaxExecutor("leader", leading)
    if case.what == WRONG:
        print(json.dumps(mislead(executor, followers[0])), flush=True)
        os._exit(0)  # the other process is gone, and jax would wait for it
    print(json.dumps(speculate(executor) if case.what == DRAFTS else lead(executor, case)), flush=True)
    leading.close()


if __name__ == "__main__":
    main(Case(**json.loads(sys.argv[1])))
