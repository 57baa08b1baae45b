"""Hung steps: the outcome of their requests, rerouting of the others, and a late return of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.sched.api.plan import UNAVAILABLE, StepPlan
from jaxserve.sched.api.policy import Role
from jaxserve.sched.cluster.cluster import Cluster
from jaxserve.sched.instance.watchdog import Patience, Watchdog
from jaxserve.sched.sim import clock
from tests.support.sched import harness
from tests.support.sched.harness import Job, Outcome

PREFILL, DECODE, MIXED = Role.PREFILL, Role.DECODE, Role.MIXED
HANG = 300.0  # seconds


def jobs(count: int = 12, every: float = 4.0, output: int = 6) -> list[Job]:
    return [Job(range(index * 100, index * 100 + 8), output, index * every) for index in range(count)]


def once(name: str, after: float = 0.0, seconds: float = HANG) -> Callable[[str, StepPlan], float]:
    """Delay the first step of instance `name` after a given time by `seconds`."""
    done: list[bool] = []

    def late(instance: str, plan: StepPlan) -> float:
        if instance != name or done or clock.loop().now < after:
            return 0.0
        done.append(True)
        return seconds

    return late


def simulate(jobs: list[Job], roles: tuple[Role, ...] = (MIXED,), **shape: Any) -> Outcome:
    return harness.simulate(jobs, roles, rest=2 * HANG, **shape)


def reasons(outcome: Outcome) -> list[str]:
    return [request.finish_reason or "" for request in outcome.requests]


class Seen:
    """A recorder of a cluster's health over time."""

    def __init__(self, *times: float) -> None:
        self.times = times
        self.ailments: list[str | None] = []
        self.roles: list[tuple[Role, ...]] = []

    def __call__(self, cluster: Cluster) -> None:
        def look() -> None:
            self.ailments.append(cluster.ailment)
            self.roles.append(tuple(core.scheduler.role for core in cluster.cores))

        for when in self.times:
            clock.loop().at(when, 1, look)


@pytest.mark.parametrize(
    ("roles", "hangs"),
    [
        ((MIXED, MIXED), "mixed0"),
        ((PREFILL, DECODE), "prefill0"),
        ((PREFILL, DECODE), "decode1"),
        ((PREFILL, PREFILL, DECODE, DECODE), "prefill0"),
        ((PREFILL, PREFILL, DECODE, DECODE), "decode2"),
    ],
)
@pytest.mark.parametrize("routing", ["least_work", "unified", "round_robin", "deflect", "prefill_budget"])
def test_a_hung_step_fails_its_requests_and_the_others_are_served(
    roles: tuple[Role, ...], hangs: str, routing: str
) -> None:
    seen = Seen(20.0, 60.0, 400.0)
    outcome = simulate(jobs(), roles, late=once(hangs, 0.1), routing=routing, watch=seen)
    assert len(outcome.requests) == 12
    failed = [one for one in outcome.requests if one.finish_reason != "stop"]
    assert 1 <= len(failed) <= 2, reasons(outcome)
    for one in failed:
        assert one.finish_reason == UNAVAILABLE and hangs in str(one.error), (one.finish_reason, one.error)
    later = [one for one in outcome.requests if one.arrival > 35.0]
    assert all(one.finish_reason == "stop" and one.token_times[-1] < 60.0 for one in later), (
        "the hung step delayed other requests"
    )
    assert seen.ailments == [None, f"a step of instance {hangs} does not end", None]
    assert seen.roles[-1] == roles, "roles are not restored"


def test_without_another_instance_requests_are_refused_until_the_hung_step_ends() -> None:
    early, late = Job(range(8), 6, 0.0), Job(range(100, 108), 6, 400.0)
    between = Job(range(200, 208), 6, 100.0)
    outcome = simulate([early, between, late], late=once("mixed0"))
    assert reasons(outcome) == [UNAVAILABLE, UNAVAILABLE, "stop"]
    assert outcome.requests[1].error == "a step of instance mixed0 does not end"


def test_prompts_waiting_on_the_only_instance_that_hangs_are_refused() -> None:
    many = [Job(range(index * 100, index * 100 + 8), 6, 0.01 * index) for index in range(10)]
    outcome = simulate(many, late=once("mixed0"), rows=2)
    assert reasons(outcome) == [UNAVAILABLE] * 10
    assert all(len(deltas) and deltas[-1].finish_reason == UNAVAILABLE for deltas in outcome.deltas.values())


def test_a_hung_step_does_not_train_the_model() -> None:
    """Its 300 s would make every later step look hopeless."""
    plain, hung = simulate(jobs(), (MIXED, MIXED)), simulate(jobs(), (MIXED, MIXED), late=once("mixed0", 0.1))
    assert plain.counters["mixed1"].predicted_seconds < 1.0 and hung.counters["mixed1"].predicted_seconds < 1.0
    assert hung.counters["mixed0"].measured_seconds > HANG


def test_a_clock_jump_alone_is_not_a_hung_step() -> None:
    """After a process was stopped for a minute, its clock jumps before the result of the step is read."""

    async def scenario() -> list[float]:
        told: list[float] = []
        jumped = [0.0]
        dog = Watchdog(Patience(10.0, 2.0), lambda: clock.loop().now + jumped[0], told.append)
        dog.began(1.0)
        await clock.asyncio.sleep(9.9)
        jumped[0] = 60.0
        await clock.asyncio.sleep(0.5)
        dog.ended()
        await clock.asyncio.sleep(100.0)
        assert not told
        dog.began(100.0)
        await clock.asyncio.sleep(199.0)
        assert not told
        await clock.asyncio.sleep(30.0)
        return told

    (seconds,) = clock.run(scenario())
    assert 200.0 <= seconds <= 212.0


def test_repeated_failures_are_reported_only_without_a_success_between() -> None:
    seen = Seen(*[0.05 * step for step in range(1, 60)])
    fails: Any = lambda name, plan: plan.step % 4 == 0  # noqa: E731
    simulate([Job(range(index * 9, index * 9 + 8), 60) for index in range(4)], fails=fails, watch=seen)
    assert seen.ailments and not any(seen.ailments)
    dead = Seen(0.5, 1.0, 2.0)
    simulate([Job(range(8), 4)] * 3, fails=lambda name, plan: True, watch=dead)
    assert any("steps of instance mixed0 failed, all within a minute" in str(one) for one in dead.ailments)
