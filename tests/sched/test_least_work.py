"""Placement by the work that is left after each instance's own prefix hit."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched import placement
from jaxserve.sched.params import SamplingParams
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.placement import Fleet
from jaxserve.sched.policies.sarathi import Sarathi
from jaxserve.sched.policy import Limits, Role
from jaxserve.sched.request import Request
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.sim import Arrival, Latency, Options, Report, simulate
from jaxserve.sched.slo import SLO

EXACT = Coefficients(fixed=0.010, prefill=1e-4, decode=1e-4, quadratic=0.0, longest=1e-7, context=1e-7)
DEVICE = Latency("test", kv_bytes_per_token=1000, kv_tokens=100_000, page_size=16, coefficients=EXACT)
TURN = 640  # tokens that a turn adds to a conversation


def instance(role: Role = Role.PREFILL) -> Scheduler:
    return Scheduler(Sarathi(), GeneralModel(EXACT), Limits(8192, 256, 6000, 16), role)


def request(id: int, tokens: int, start: int = 0) -> Request:
    return Request(id, range(start, start + tokens), SamplingParams(), SLO(), 0.0)


def order(one: Request, *instances: Scheduler) -> list[int]:
    return placement.make("least_work").prefill(one, Fleet(0.0, instances, lambda tokens: 0.0))


def test_counts_what_is_to_be_computed_and_not_how_many_wait() -> None:
    busy, crowded = instance(), instance()
    busy.add(request(0, 5000))
    for id in range(1, 5):
        crowded.add(request(id, 1000, 10_000 * id))
    assert order(request(9, 10, 90_000), busy, crowded) == [1, 0]


def test_never_a_decode_instance() -> None:
    assert order(request(9, 10), instance(), instance(Role.DECODE), instance()) == [0, 2]


def test_a_prefix_is_worth_what_it_saves_and_no_more() -> None:
    """800 of the prompt's 1,000 tokens are cached on the second instance."""
    for backlog, best in ((799, 1), (800, 0), (801, 0)):
        empty, holder = instance(), instance()
        held = request(0, 800)
        pages = holder.blocks.take((), 50)
        assert pages is not None
        for page, digest in zip(pages, holder._memory.digests(held, 800), strict=True):
            holder.blocks.register(page, digest)
        holder.add(request(1, backlog, 50_000))
        assert order(request(9, 1000), empty, holder)[0] == best


@given(backlogs=st.lists(st.lists(st.integers(1, 5000), max_size=4), min_size=1, max_size=5), new=st.integers(1, 5000))
@settings(max_examples=60)
def test_orders_all_instances_by_their_backlog(backlogs: list[list[int]], new: int) -> None:
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
    """So many conversations, each turn the one before and 640 tokens more; they speak in turn, a second apart."""
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


def test_conversations_stay_where_their_prefix_is() -> None:
    """Three conversations on two prefill instances: in turn every turn comes to the other instance, and finds what
    the turn before the last one left; by least work it finds all of the last one."""
    talk = conversations(3, 4)
    found = {
        name: simulate(talk, "distserve", "4x1", DEVICE, options=Options(placement=name))
        for name in ("least_work", "round_robin")
    }
    assert hits(found["least_work"]) == 3 * TURN * (1 + 2 + 3)
    assert hits(found["round_robin"]) == 3 * TURN * (0 + 1 + 2)
    assert all(one.counters.prefix_queries == 3 * TURN * (1 + 2 + 3 + 4) for one in found.values())
