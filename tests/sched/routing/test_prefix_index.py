"""An index of cache events has what the caches have, after any history."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.request import Request
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.routing.prefix_index import KEPT, PrefixIndex
from tests.support.examples import examples
from tests.support.sched.fleet import instance, request, step


def prompt(id: int, prefix: int, pages: int) -> Request:
    """Return a request whose first tokens depend on `prefix` alone."""
    made = request(id, 16 * pages + 5)
    made.prompt = tuple(1000 * prefix + at // 48 for at in range(16 * pages)) + (id,) * 5
    return made


def serve(one: Scheduler, new: Request) -> None:
    one.add(new)
    step(one)
    one.cancel(new.id, "abort")


EVENTS = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 6), st.integers(0, 9))


@given(st.lists(EVENTS, max_size=40))
@settings(max_examples=examples(60), deadline=None)
def test_the_index_equals_the_caches_after_any_history(history: list[tuple[int, int, int, int]]) -> None:
    live = [instance(Role.MIXED, pages=12) for _ in range(3)]  # few pages, so that some are evicted
    events, index = [one.blocks.follow() for one in live], PrefixIndex(16, 3)

    def learn(at: int) -> None:
        gained, lost = ([digest[:KEPT] for digest in some] for some in events[at].take())
        index.update(at, gained, lost)

    for id, (at, prefix, pages, kind) in enumerate(history):
        if kind == 0:
            live[at].reset_prefix_cache()
        elif kind == 1:
            learn(at)
        elif kind == 2:  # a new reader begins with the whole cache
            live[at].blocks.unfollow(events[at])
            events[at] = live[at].blocks.follow()
            index.clear(at)
        else:
            serve(live[at], prompt(id, prefix, pages))
    for at in range(3):
        learn(at)
    for prefix in range(4):
        one = prompt(10_000 + prefix, prefix, 7)
        assert index.hits(one).tolist() == [scheduler.cached_tokens(one) for scheduler in live]
    for at in range(3):
        index.clear(at)
    assert not len(index)
