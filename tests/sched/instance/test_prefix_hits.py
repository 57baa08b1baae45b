"""Prefix hits of waiting prompts are kept up to date at every step, not only at arrival."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.block_pool import BlockPool
from jaxserve.sched.instance.kv_manager import KVManager
from jaxserve.sched.instance.prefix_hits import PrefixHits
from tests.support.examples import examples
from tests.support.sched.cost import calls

PROMPTS = st.lists(
    st.integers(0, 1), min_size=1, max_size=8
)  # prompts of up to 8 binary tokens, so that many share a prefix


def request(id: int, prompt: list[int], arrival: float = 0.0) -> Request:
    return Request(id, NewRequest(prompt, SamplingParams(max_tokens=4), SLO()), arrival)


class Hits(RuleBasedStateMachine):
    """A state machine with waiting requests beside others that fill, release and evict pages of a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = KVManager(BlockPool(10, 1), 100)
        self.hits = PrefixHits(self.memory)
        self.waiting: dict[int, Request] = {}
        self.running: list[tuple[Request, int]] = []  # with their computed tokens
        self.next = 0

    def new(self, prompt: list[int]) -> Request:
        self.next += 1
        return request(self.next, prompt)

    @rule(prompt=PROMPTS)
    def wait(self, prompt: list[int]) -> None:
        one = self.new(prompt)
        self.waiting[one.id] = one
        self.hits.watch(one)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[id]
        self.hits.unwatch(id)

    @rule(prompt=PROMPTS)
    def admit(self, prompt: list[int]) -> None:
        one = self.new(prompt)
        if self.memory.admit(one, 0):
            self.running.append((one, one.computed))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.running) - 1))
        one, done = self.running[at]
        more = data.draw(st.integers(done, one.known))
        self.memory.register(one, done, more)
        self.running[at] = one, more

    @precondition(lambda self: self.running)
    @rule(data=st.data(), condemned=st.booleans())
    def end(self, data: st.DataObject, condemned: bool) -> None:
        one, _ = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if condemned:
            self.memory.condemn(one)
        self.memory.vacate(one)

    @invariant()
    def as_a_new_look_finds(self) -> None:
        before = {id: one.hit for id, one in self.waiting.items()}
        changed = {one.id for one in self.hits.refresh()}
        self.hits.check()
        assert {id for id, one in self.waiting.items() if one.hit != before[id]} == changed
        assert set(self.hits) == set(self.waiting)


TestHits = Hits.TestCase
TestHits.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


def test_a_change_of_the_cache_costs_the_same_however_many_requests_wait() -> None:
    """A new page is looked up only for the waiting requests that need it next."""
    cost = []
    for waiting in (10, 1000):
        memory = KVManager(BlockPool(100, 1), 8)
        hits = PrefixHits(memory)
        for id in range(waiting):
            hits.watch(request(id, [1, 2, 3, 1000 + id]))
            hits.watch(request(-1 - id, [1000 + id, 2, 3]))
        running = request(10_000, [1000, 2, 9])
        assert memory.admit(running, 0)
        memory.register(running, 0, 2)
        found: list[Request] = []
        cost.append(calls(lambda hits=hits, found=found: found.extend(hits.refresh())))
        assert [(one.id, one.hit) for one in found] == [(-1, 2)]
    assert cost[0] == cost[1]


def test_an_evicted_first_page_ends_a_hit_although_the_second_page_is_held() -> None:
    """Two requests computed the same prefix at once: each page is cached as filled by the first of them."""
    memory = KVManager(BlockPool(4, 1), 4)
    blocks, hits, waiting = memory.blocks, PrefixHits(memory), request(0, [5, 6, 7])
    first, second = memory.digests(waiting, 2)
    pages = [blocks.take((), 1), blocks.take((), 1)]
    assert pages[0] is not None and pages[1] is not None
    blocks.register(pages[0][0], first, b"")
    blocks.register(pages[1][0], second, first)
    hits.watch(waiting)
    assert waiting.hit == 2
    blocks.release(pages[0])
    assert blocks.take((), 3) is not None  # one of them was the idle first page
    assert list(hits.refresh()) == [waiting] and waiting.hit == 0
    hits.check()
