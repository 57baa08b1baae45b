"""The law of tokens with steps stopped at random at every boundary."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from jaxserve.cli.replay import perf_of
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.runtime.segment_pace import SegmentPace
from jaxserve.sched import policies
from jaxserve.sched.api.policy import Decision, Policy, View
from jaxserve.sched.api.request import Request, State
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.cluster.cluster import Cluster
from jaxserve.sched.instance.loop import Core
from jaxserve.sched.journal import Journal, replay
from tests.support.examples import cases, whole
from tests.support.parity.asks import ROOMY, TIGHT, Faults, asks, constrained
from tests.support.parity.families import model
from tests.support.parity.law import LENGTH, PAGE, SPEC, Ask, Model, Setup, compare

DEEP = Model(replace(SPEC, layers=4))
MESHES, BOUNDARIES, POLICIES = ("1x1", "1x2", "2x1", "2x2"), ("op", "layer"), ("distserve", "unified", "flowprefill")
CASES = list(itertools.product(MESHES, BOUNDARIES, (ROOMY, TIGHT), POLICIES))
BARE = [("1x1", "op", TIGHT, "distserve"), ("2x1", "layer", ROOMY, "unified")]
MOST_RUNS = 8
FAMILIES = ("Gemma3", "Qwen3Moe", "DeepseekV2", "OPT", "GptOss")


class RandomPreemption:
    """A policy that stops and resumes steps at random and otherwise delegates. Writer of its generator."""

    def __init__(self, inner: Policy, seed: int) -> None:
        self._inner = inner
        self._dice = random.Random(seed)

    def decide(self, view: View) -> Decision:
        if view.running is not None:
            return Decision(preempt=self._dice.random() < 0.7)
        if view.suspended and self._dice.random() < 0.5:
            return Decision(resume=self._dice.choice(view.suspended).step)
        decision = self._inner.decide(view)
        decoding = {request.id for request in view.decode}
        prompts = tuple(grant for grant in decision.grants if grant.request not in decoding)
        held = len(decoding) + int(view.prefill.running.sum()) + sum(len(task.requests) for task in view.suspended)
        room = held < view.limits.rows and view.free_pages > LENGTH // PAGE + len(decoding)
        granted = {grant.request for grant in prompts}
        begun = any(one.id in granted and one.state is State.RUNNING for one in view.prefill)
        # without room for one of them nothing would run, and no decision would follow
        alone = prompts and (room or begun) and self._dice.random() < 0.7
        return replace(decision, grants=prompts) if alone else decision  # alone: a step that can be stopped


class On(Setup):
    """A setup of the executors of another one."""

    def __init__(self, setup: Setup) -> None:
        vars(self).update(vars(setup))


class PreemptingSetup(On):
    """A setup with `RandomPreemption` policies that decide at every boundary, as if an event had happened there."""

    def run(self, asks: Sequence[Ask], policy: str, seed: int, **options: Any) -> tuple[list[Request], Cluster]:  # type: ignore[override]
        try:
            return super().run(asks, lambda: RandomPreemption(policies.make(policy), seed), **options)
        finally:
            for executor in self.executors:
                del executor._passed

    def _cluster(self, *args: Any) -> Cluster:
        cluster = super()._cluster(*args)
        for executor, core in zip(self.executors, cluster.cores, strict=True):
            executor._passed = partial(_passed, executor, core)  # type: ignore[method-assign]
        return cluster


def _passed(executor: JaxExecutor, core: Core, *arguments: Any) -> None:
    JaxExecutor._passed(executor, *arguments)
    core.wake()


class LateDecodes(On):
    """A setup with running decodes that are always late, so that prompts beside them get their minimum share."""

    slo = SLO(1.0, 1e-3)


def setup(mesh: str, boundary: str, pages: int, tokens: int = 32) -> Setup:
    """Return executors of this size; in a bare run those of the boundary, whose schedulers see this size."""
    if whole():
        return built(mesh, boundary, tokens, pages)
    return built("2x1" if boundary == "layer" else "1x1", boundary, 64, ROOMY).narrowed(mesh, tokens, pages)


@cache
def built(mesh: str, boundary: str, tokens: int, pages: int, of: Model = DEEP) -> Setup:
    made = Setup(mesh, tokens, pages, model=of, preempt_boundary=boundary)
    for executor in made.executors:
        executor.pace = SegmentPace(1)
    return made


@cache
def unstopped(of: Model = DEEP) -> Setup:
    return Setup("1x1", 64, ROOMY, model=of)


@cache
def alone(seed: int) -> tuple[Request, ...]:
    """Serve each request alone on 1x1 in whole steps as the reference."""
    return unstopped().each(asks(seed))


def stops(cluster: Cluster) -> int:
    return sum(core.scheduler.counters.suspended for core in cluster.cores)


@pytest.mark.parametrize("case", cases(BARE, CASES), ids=str)
def test_stopping_steps_does_not_change_the_tokens(case: tuple[str, str, int, str]) -> None:
    """Check the law until enough steps were stopped, which depends on the speed of the machine."""
    mesh, boundary, pages, policy = case
    engine, enough = setup(mesh, boundary, pages), 6 if pages == ROOMY else 1
    for served in stopped(engine, asks(1), policy, enough):
        assert all(request.finish_reason in ("stop", "length") for request in served)
        assert compare(asks(1), served, alone(1), DEEP) <= 1


def stopped(setup: Setup, requests: Sequence[Ask], policy: str, enough: int) -> Iterator[list[Request]]:
    """Repeat the run with other seeds until `enough` steps were stopped."""
    engine, found = PreemptingSetup(setup), 0
    for seed in range(5, 5 + MOST_RUNS):
        served, cluster = engine.run(requests, policy, seed)
        yield served
        found += stops(cluster)
        if found >= enough:
            return
    raise AssertionError(f"only {found} steps were stopped in {MOST_RUNS} runs, {enough} are required")


def test_stopping_steps_does_not_change_structured_outputs() -> None:
    requests = constrained(1)
    unbroken = unstopped().each(requests)
    for served in stopped(setup("1x1", "op", ROOMY), requests, "unified", 6):
        assert compare(requests, served, unbroken, DEEP) <= 1


@pytest.mark.parametrize("boundary", ["op", "layer"])
def test_stopping_prompts_for_running_decodes_does_not_change_the_tokens(boundary: str) -> None:
    """On a mixed instance under `flowprefill` as served, only TPOT stops steps here; a slow machine may stop none."""
    engine = LateDecodes(setup("1x1", boundary, ROOMY, 64))
    for _ in range(MOST_RUNS):
        file = io.StringIO()
        served, cluster = engine.run(asks(1), "flowprefill", journal=Journal(file))
        counters = cluster.cores[0].scheduler.counters
        assert counters.suspended == counters.resumed
        assert counters.asked == sum(counters.blocked) >= counters.suspended
        assert all(request.finish_reason in ("stop", "length") for request in served)
        assert compare(asks(1), served, alone(1), DEEP) <= 1
        assert replay(file.getvalue().splitlines(), perf_of).differences == []
        if counters.suspended and counters.blocking > 0:
            return
    raise AssertionError(f"no step was stopped in {MOST_RUNS} runs")


def test_cancelling_suspended_requests_leaks_nothing() -> None:
    """Pages, slots and activations are freed (`Setup` checks the pages)."""
    requests = asks(1, cancel=True)
    engine = PreemptingSetup(setup("1x1", "op", TIGHT))
    served, cluster = engine.run(requests, "distserve", 3)
    assert stops(cluster) > 0
    assert any(request.finish_reason == "abort" for request in served)
    compare(requests, served, alone(1), DEEP)
    assert not any(executor._suspended or executor._queue for executor in engine.executors)


def test_steps_that_raise_beside_suspended_ones_do_not_change_the_tokens() -> None:
    requests = asks(2)
    served, cluster = PreemptingSetup(setup("1x1", "op", TIGHT)).run(requests, "distserve", 7, watch=Faults(every=9))
    assert sum(core.scheduler.counters.rebuilds for core in cluster.cores) >= 2
    compare(requests, served, alone(2), DEEP)


@pytest.mark.parametrize("name", ["Qwen3Next", *(pytest.param(name, marks=pytest.mark.full) for name in FAMILIES)])
def test_stopping_steps_does_not_change_the_tokens_of_a_family(name: str) -> None:
    of, requests = model(name), asks(1, 6)
    expected = unstopped(of).each(requests)
    mesh, tokens, pages = ("1x2", 32, ROOMY + PAGE) if whole() else ("1x1", 64, ROOMY)  # those of `unstopped`
    for served in stopped(built(mesh, "op", tokens, pages, of), requests, "distserve", 6):
        compare(requests, served, expected, of)
