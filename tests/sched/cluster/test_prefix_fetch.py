"""Laws of prefix fetches in virtual time: whatever sources do, no request, page or token is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import UNAVAILABLE, StepPlan
from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.request import Request
from jaxserve.sched.cluster.cluster import Cluster
from jaxserve.sched.cluster.prefix_fetch import LEAST_PATIENCE
from jaxserve.sched.sim import clock
from tests.support.examples import examples
from tests.support.sched.complete import JOB, ROLES, check_complete, check_told
from tests.support.sched.harness import Job, every, simulate
from tests.support.sched.sources import BEHAVIORS, Source

SOURCE = st.builds(
    Source,
    behaviors=st.lists(st.sampled_from(BEHAVIORS), min_size=1, max_size=4),
    seconds=st.sampled_from([0.0, 1e-5, 1e-4]),
    pages=st.sampled_from([1, 3, 1 << 30]),
)


def run(jobs: list[Job], *sources: Source, roles: tuple[Role, ...] = (Role.MIXED,), **shape: Any) -> tuple[Any, Any]:
    """Return the outcome, and the prefix fetches of the cluster after it."""
    seen: list[Cluster] = []
    outcome = simulate(jobs, roles, sources=sources, watch=seen.append, **shape)
    return outcome, seen[0].prefix_fetch


@given(
    jobs=st.lists(JOB, min_size=1, max_size=8),
    sources=st.lists(SOURCE, min_size=1, max_size=2),
    roles=st.sampled_from(list(ROLES.values())),
    pages=st.sampled_from([9, 14, 64]),
    lost=st.sampled_from([0, 2, 5]),
    fail=st.sampled_from([10_000, 10_000, 4, 7]),
)
@settings(max_examples=examples(150))
def test_whatever_sources_do_every_request_gets_its_tokens(jobs, sources, roles, pages, lost, fail) -> None:  # type: ignore[no-untyped-def]
    """Steps may raise. Every second or fifth import may fail, if no transfers would fail their requests with it."""
    seen = [0]

    def loses() -> bool:
        seen[0] += 1
        return bool(lost) and roles == (Role.MIXED,) and seen[0] % lost == 0

    outcome, fetches = run(jobs, *sources, roles=roles, pages=pages, rows=4, tokens=16, loses=loses, fails=every(fail))
    check_told(outcome)
    if fail == 10_000:
        check_complete(outcome, jobs, cancelled=True)
    assert fetches.pages + fetches.unused == sum(source.given for source in sources)


@given(
    jobs=st.lists(JOB, min_size=1, max_size=8),
    source=SOURCE,
    changes=st.lists(st.tuples(st.floats(0, 0.08), st.sampled_from(list(Role)), st.integers(0, 3)), max_size=5),
)
@settings(max_examples=examples(60))
def test_role_changes_lose_no_held_request(jobs, source, changes) -> None:  # type: ignore[no-untyped-def]
    turns = [(at, {index: role}) for at, role, index in changes]
    outcome, _ = run(jobs, source, roles=ROLES["4x1"], pages=14, rows=4, tokens=16, role_changes=turns)
    check_complete(outcome, jobs, cancelled=True)


@pytest.mark.parametrize(
    ("length", "seconds", "params", "cached"),
    [
        pytest.param(41, 1e-5, {}, 40, id="fetched pages are prefix hits"),
        pytest.param(1, 1e-5, {}, 0, id="the last token is computed here"),
        pytest.param(4, 1e-5, {}, 0, id="a prompt of one page"),
        pytest.param(41, 1.0, {}, 0, id="a source that is slower than computing"),
        pytest.param(41, 1e-5, {"prompt_logprobs": 1}, 0, id="log-probabilities of every position"),
    ],
)
def test_a_source_is_asked_only_if_that_saves_time(length: int, seconds: float, params: Any, cached: int) -> None:
    source, job = Source(seconds=seconds), Job(range(length), 4, params=SamplingParams(max_tokens=None, **params))
    outcome, fetches = run([job], source)
    assert outcome.requests[0].cached == cached == 4 * fetches.pages
    assert bool(source.asked) == bool(cached) == bool(fetches.requests)


def test_a_source_is_asked_again_for_the_rest() -> None:
    source = Source(["short"])
    outcome, fetches = run([Job(range(41), 4)], source)
    assert [start for _, start, _ in source.asked] == list(range(len(source.asked))) and len(source.asked) > 1
    assert outcome.requests[0].cached == 4 * fetches.pages > 4


def test_the_fastest_source_is_asked_first_and_another_one_for_what_it_lacks() -> None:
    slow, fast = Source(seconds=1e-4), Source(seconds=1e-5, pages=6)
    outcome, _ = run([Job(range(41), 4)], slow, fast)
    assert fast.asked == [(0, 0, 6), (0, 6, 10)] and slow.asked == [] and outcome.requests[0].cached == 40
    fast.behaviors, fast.asked = ["raises"], []
    outcome, fetches = run([Job(range(41), 4)], slow, fast)
    assert fast.asked == [(0, 0, 6)] and slow.asked == [(0, 0, 10)]
    assert outcome.requests[0].cached == 40 and fetches.failures == 1


@pytest.mark.parametrize("behavior", ["never", "deaf", "late"])
def test_a_request_waits_no_longer_than_computing_its_prompt_would_take(behavior: str) -> None:
    alone = simulate([Job(range(200), 4)], pages=128).requests[0]
    outcome, _ = run([Job(range(200), 4)], Source([behavior]), pages=128)
    request = outcome.requests[0]
    assert request.cached == 0 and request.finish_reason == "stop"
    assert alone.first_token_at is not None and request.first_token_at is not None
    patience = max(LEAST_PATIENCE, 1.05 * alone.first_token_at)
    assert alone.first_token_at < request.first_token_at <= alone.first_token_at + patience


def test_the_same_pages_are_fetched_once() -> None:
    source = Source(seconds=5e-5)
    outcome, fetches = run([Job(range(41), 4, arrival=0.0001 * index) for index in range(5)], source)
    assert len(source.asked) == 1 and fetches.requests == 5 and fetches.pages == 10
    assert [request.cached for request in outcome.requests] == [40] * 5


@pytest.mark.parametrize(("behavior", "used"), [("all", True), ("late", False)])
def test_pages_that_come_after_their_prompt_was_computed_are_counted(behavior: str, used: bool) -> None:
    source, seen, job = Source([behavior]), list[Cluster](), Job(range(41), 4, arrival=0.01)

    def begin(cluster: Cluster) -> None:
        seen.append(cluster)
        like = Request(1000, NewRequest(job.prompt, job.params, job.slo), 0.0)
        clock.loop().at(0.0, 0, cluster.prefix_fetch.ahead, like, cluster.cores[0], source, 5.0)

    outcome = simulate([job], watch=begin)
    fetches = seen[0].prefix_fetch
    assert (fetches.pages, fetches.unused) == ((10, 0) if used else (0, 10)) and fetches.failures == 0
    assert outcome.requests[0].cached == (40 if used else 0)


@pytest.mark.parametrize("roles", [(Role.MIXED, Role.MIXED), (Role.MIXED,)])
def test_held_requests_leave_an_instance_that_hangs(roles: tuple[Role, ...]) -> None:
    """The first step of an instance counts as hung after 31 s, when two requests have been held for 10 ms."""
    jobs = [Job(range(100 * index, 100 * index + 80), 4, arrival=30.99 if index else 0.0) for index in range(3)]
    held: list[int] = []

    def log(name: str) -> Any:
        return lambda kind, **fields: held.append(len(clusters[0].prefix_fetch)) if kind == "hang" else None

    def late(name: str, plan: StepPlan) -> float:
        return 300.0 if name == "mixed0" and any(span.request == 0 for span in plan.spans) else 0.0

    clusters: list[Cluster] = []
    sources = [Source(["raises", "never", "never"])]
    outcome = simulate(jobs, roles, sources=sources, watch=clusters.append, pages=128, rest=1e3, log=log, late=late,
                       routing="round_robin")  # fmt: skip
    assert held[0] == 2 and len(held) == 2, "both were held when the step counted as hung, and it came back"
    assert outcome.requests[0].finish_reason == UNAVAILABLE
    others = {request.finish_reason for request in outcome.requests[1:]}
    assert others == {"stop" if len(roles) > 1 else UNAVAILABLE}
