"""Routing by the work left after each instance's prefix hit, and KV write-back for later hits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched import routing
from jaxserve.sched.api.errors import StepFailed
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import KVBuffer
from jaxserve.sched.api.policy import Limits, Role
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.policies.sarathi import Sarathi
from jaxserve.sched.routing.base import Fleet
from jaxserve.sched.sim import Arrival, Latency, Options, Report, simulate
from jaxserve.sched.sim.executor import SimExecutor
from tests.support.examples import examples
from tests.support.sched.complete import JOB, ROLES, check_complete
from tests.support.sched.harness import Job
from tests.support.sched.harness import simulate as serve

EXACT = Coefficients(fixed=0.010, prefill=1e-4, decode=1e-4, quadratic=0.0, longest=1e-7, context=1e-7)
DEVICE = Latency("test", kv_bytes_per_token=1000, kv_tokens=100_000, page_size=16, coefficients=EXACT)
TURN = 640  # tokens that a turn adds to a conversation


def instance(role: Role = Role.PREFILL) -> Scheduler:
    return Scheduler(Sarathi(), GeneralModel(EXACT), Limits(8192, 256, 6000, 16), role)


def request(id: int, tokens: int, start: int = 0) -> Request:
    return Request(id, NewRequest(range(start, start + tokens), SamplingParams(), SLO()), 0.0)


def order(one: Request, *instances: Scheduler) -> list[int]:
    return routing.make("least_work").prefill(one, Fleet(0.0, instances, lambda tokens: 0.0))


def test_a_prefix_counts_as_the_tokens_it_saves() -> None:
    """800 of the prompt's 1,000 tokens are cached on the second instance."""
    for backlog, best in ((799, 1), (800, 0), (801, 0)):
        empty, holder = instance(), instance()
        held = request(0, 800)
        pages = holder.blocks.take((), 50)
        assert pages is not None
        for page, digest in zip(pages, holder._kv.digests(held, 800), strict=True):
            holder.blocks.register(page, digest, b"")
        holder.add(request(1, backlog, 50_000))
        assert order(request(9, 1000), empty, holder)[0] == best


@given(backlogs=st.lists(st.lists(st.integers(1, 5000), max_size=4), min_size=1, max_size=5), new=st.integers(1, 5000))
@settings(max_examples=examples(60))
def test_sorts_all_instances_by_their_backlog(backlogs: list[list[int]], new: int) -> None:
    instances = []
    for number, backlog in enumerate(backlogs):
        instances.append(instance())
        for id, tokens in enumerate(backlog):
            instances[-1].add(request(id, tokens, 100_000 * (10 * number + id + 1)))
    found = order(request(99, new), *instances)
    assert sorted(found) == list(range(len(backlogs)))
    left = [sum(backlogs[index]) for index in found]
    assert left == sorted(left)


def conversations(count: int, turns: int) -> list[Arrival]:
    """Return conversations that take turns, a second apart; each turn repeats the last and adds 640 tokens."""
    return [
        Arrival(
            float(turn * count + one), TURN * (turn + 1), 2, hash_ids=tuple(100 * one + i for i in range(turn + 1)),
            block=TURN,
        )
        for turn in range(turns)
        for one in range(count)
    ]  # fmt: skip


def hits(report: Report) -> int:
    return report.counters.prefix_hits


def test_conversations_stay_with_their_cached_prefix() -> None:
    """Compare prefix hits of three conversations on two prefill instances by router.

    Round robin sends every turn to the other instance, which holds the turn before the last one.
    Least work finds the whole last turn.
    """
    talk = conversations(3, 4)
    found = {
        name: simulate(talk, "distserve", "4x1", DEVICE, options=Options(routing=name))
        for name in ("least_work", "round_robin")
    }
    assert hits(found["least_work"]) == 3 * TURN * (1 + 2 + 3)
    assert hits(found["round_robin"]) == 3 * TURN * (0 + 1 + 2)
    assert all(one.counters.prefix_queries == 3 * TURN * (1 + 2 + 3 + 4) for one in found.values())


# KV write-back

PD = (Role.PREFILL, Role.DECODE)
GIVE = "least_work:write_back"


def rounds(output: int, later: float = 10.0, **more: float | None) -> list[Job]:
    """Return a prompt of 16 tokens and a later one of it, its answer and 4 more.

    The simulated model outputs only 1s.
    """
    first = list(range(100, 116))
    return [Job(first, output, **more), Job([*first, *[1] * (output - 1), 7, 7, 7, 7], 3, later)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("output", "cached", "without"), [(9, 24, 16), (10, 24, 16), (8, 20, 16), (2, 16, 16)])
def test_the_next_round_finds_the_answer_of_the_last(output: int, cached: int, without: int) -> None:
    """With pages of 4, the prompt fills 4 pages and the answer, except for its last token without KV, up to 2."""
    assert serve(rounds(output), PD, routing=GIVE).requests[1].cached == cached
    assert serve(rounds(output), PD).requests[1].cached == without


def test_cancelled_or_lost_kv_is_not_written_back() -> None:
    assert serve(rounds(9, cancel_at=0.004), PD, routing=GIVE).requests[1].cached == 16
    sent = iter([False, True])  # the prompt arrives, the answer does not
    assert serve(rounds(9), PD, routing=GIVE, loses=lambda: next(sent, False)).requests[1].cached == 16


def test_an_answer_in_a_lost_pool_is_not_written_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last step succeeds and the next one raises: no KV leaves the decode instance, and serving continues."""
    export, sent = SimExecutor.export_kv, []

    def lost(self: SimExecutor, pages: Sequence[int]) -> KVBuffer:
        sent.append(len(pages))
        if len(sent) == 2:  # the prompt has moved; this is the answer
            raise StepFailed("injected: the pool is gone")
        return export(self, pages)

    monkeypatch.setattr(SimExecutor, "export_kv", lost)
    jobs = rounds(9)
    found = serve(jobs, PD, routing=GIVE)
    check_complete(found, jobs)
    assert found.requests[1].cached == 16 and len(sent) > 2


@given(
    jobs=st.lists(JOB, min_size=1, max_size=8),
    roles=st.sampled_from([ROLES["2x1"], ROLES["4x1"]]),
    pages=st.integers(9, 14),
    every=st.integers(2, 9),
)
@settings(max_examples=examples(80))
def test_write_back_loses_nothing(jobs, roles, pages, every) -> None:  # type: ignore[no-untyped-def]
    """With small pools, cancellations and failing transfers, all pages are free or cached at the end."""
    count = [0]

    def loses() -> bool:
        count[0] += 1
        return count[0] % every == 0 and count[0] < 40

    found = serve(jobs, roles, routing=GIVE, pages=pages, rows=3, loses=loses)
    assert [request.id for request in found.requests] == list(range(len(jobs)))
