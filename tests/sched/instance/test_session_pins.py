"""Pages that sessions pin are evicted last, within a bound, and nothing else changes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import NO_SLO
from jaxserve.sched.instance.block_pool import BlockPool
from jaxserve.sched.instance.kv_manager import KVManager
from jaxserve.sched.instance.session_pins import PinTotals
from jaxserve.sched.journal import replay
from jaxserve.sched.sim import Arrival, Mesh, Options, simulate
from tests.support.examples import examples
from tests.support.sched.cases import ADMISSIONS, JOB, MESHES, POLICIES, ROUTERS, SHAPE
from tests.support.sched.complete import check_complete
from tests.support.sched.laws import Watch, check_tokens
from tests.support.sched.presets import TINY
from tests.support.sched.recorded import perf, recorded

PAGES, SIZE, SHARE, TIMEOUT = 16, 4, 0.5, 10.0
MOST = 8


def made(share: float = SHARE, timeout: float = TIMEOUT) -> KVManager:
    return KVManager(BlockPool(PAGES, SIZE), 8, share=share, timeout=timeout)


def begin(kv: KVManager, start: int, tokens: int, session: str = "") -> Request | None:
    """Admit a request, and compute its prompt and one token of output."""
    request = Request(start, NewRequest(range(start, start + tokens), SamplingParams(), NO_SLO, session=session), 0.0)
    if not kv.admit(request, 0):
        return None
    kv.register(request, 0, tokens)
    return request


def end(kv: KVManager, request: Request, at: float) -> None:
    request.pending = 1
    request.gain(7, at)
    kv.pin(request)
    kv.vacate(request)


def served(kv: KVManager, start: int, tokens: int, session: str = "", at: float = 0.0) -> int:
    """Serve a request and return the prompt tokens that it found."""
    request = begin(kv, start, tokens, session)
    assert request is not None
    found = request.computed
    end(kv, request, at)
    kv.check((), (), 8)
    return found


class Pins(RuleBasedStateMachine):
    """A state machine of requests with and without sessions, in a pool that they overfill."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.kv = made()
        self.alive: dict[int, Request] = {}
        self.count, self.now = 0, 0.0

    @rule(
        target=running, start=st.sampled_from([0, 0, 1000, 2000, 3000]), tokens=st.integers(1, 50),
        session=st.sampled_from(["", "a", "b", "c", "d"]),
    )  # fmt: skip
    def begin(self, start: int, tokens: int, session: str):  # type: ignore[no-untyped-def]
        blocks = self.kv.blocks
        before, needed = blocks.available, blocks.count(tokens)
        request = begin(self.kv, start, tokens, session)
        if request is None:
            assert before < needed or self.kv.free_slots == 0, "a pin blocked an admission"
            assert blocks.available == before
            return multiple()
        self.count += 1
        self.alive[self.count] = request
        return self.count

    @rule(one=running, passed=st.floats(0, 6))
    def end(self, one: int, passed: float) -> None:
        request = self.alive.pop(one, None)
        if request is not None:
            self.now += passed
            end(self.kv, request, self.now)
            assert self.kv.pins.pages_of(request.asked.session) <= request.prompt_length // SIZE + 1

    @rule(passed=st.floats(0, 12))
    def expire(self, passed: float) -> None:
        self.now += passed
        self.kv.pins.expire(self.now)
        assert all(self.now - pin.at <= TIMEOUT for pin in self.kv.pins)

    @rule(session=st.sampled_from(["a", "b", "c", "d"]))
    def end_session(self, session: str) -> None:
        kept = self.kv.pins.pages_of(session)
        assert self.kv.pins.end(session) == (kept > 0) and self.kv.pins.pages_of(session) == 0

    @rule()
    def forget(self) -> None:
        self.kv.forget_cached()
        assert len(list(self.kv.pins)) == 0

    @invariant()
    def conserved(self) -> None:
        self.kv.check(self.alive.values(), (), 8)
        assert self.kv.blocks.held == len({page for one in self.alive.values() for page in one.pages})
        assert self.kv.blocks.pinned <= MOST


TestPins = Pins.TestCase
TestPins.settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_pinned_pages_go_last_and_the_end_of_the_prefix_first() -> None:
    kv = made()
    assert served(kv, 0, 21, "a") == 0  # five full pages
    for other in range(1, 6):
        served(kv, 1000 * other, 40)
    assert served(kv, 0, 21) == 20 and kv.pins.take_totals() == PinTotals()
    assert served(kv, 9000, 13 * SIZE) == 0, "a running request needs two of the five pages"
    assert kv.pins.take_totals() == PinTotals(evicted=2)
    assert served(kv, 0, 21) == 12


def test_recent_sessions_displace_others_and_prompts_above_the_bound_keep_their_beginning() -> None:
    kv = made()
    served(kv, 0, 12, "a")
    served(kv, 1000, 12, "b")
    served(kv, 2000, 12, "c")
    assert [kv.pins.pages_of(one) for one in "abc"] == [0, 3, 3]
    assert kv.pins.take_totals() == PinTotals(displaced=1)
    served(kv, 3000, 60, "d")
    assert [kv.pins.pages_of(one) for one in "bcd"] == [0, 0, MOST] and kv.blocks.pinned == MOST
    assert kv.pins.take_totals() == PinTotals(displaced=2, evicted=5)


def test_sessions_with_the_same_prefix_pin_it_once_and_end_once() -> None:
    kv = made()
    for session in "abcdefg":
        served(kv, 0, 12, session)
    assert kv.blocks.pins == 3 and len(list(kv.pins)) == 7
    served(kv, 1000, 60, "z")
    assert kv.pins.take_totals().displaced == 7
    assert kv.pins.end("z") and kv.pins.pages_of("z") == 0 and not kv.pins.end("z")


TURNS = st.lists(
    st.builds(lambda job, session: replace(job, session=session), JOB, st.sampled_from(["", "a", "b"])),
    min_size=2,
    max_size=10,
)


@settings(max_examples=examples(40))
@given(
    policy=st.sampled_from(POLICIES), mesh=st.sampled_from(list(MESHES)), routing=st.sampled_from(ROUTERS),
    admission=st.sampled_from(ADMISSIONS), jobs=TURNS, shape=SHAPE,
)  # fmt: skip
def test_sessions_change_evictions_only(policy, mesh, routing, admission, jobs, shape) -> None:  # type: ignore[no-untyped-def]
    """Every law holds under pressure; without evictions every plan is the same as without sessions."""

    def run(turns: list[Any], **more: Any) -> Any:
        watch = Watch(policy, seal=False)
        return watch, watch.run(turns, MESHES[mesh], routing=routing, admission=admission, **{**shape, **more})

    plain = [replace(job, session="") for job in jobs]
    watch, outcome = run(jobs)
    check_complete(outcome, jobs, refuses=admission.endswith(":refuse"))
    check_tokens(outcome, watch.records, page_size=4)
    _, other = run(plain)
    both = [
        pair
        for pair in zip(outcome.requests, other.requests, strict=True)
        if "refused" not in (pair[0].finish_reason, pair[1].finish_reason)
    ]
    assert all(one.output == same.output for one, same in both)
    (roomy, ended), (without, also) = run(jobs, pages=2000), run(plain, pages=2000)
    assert roomy.records == without.records and ended.ended == also.ended


@settings(max_examples=examples(30))
@given(jobs=TURNS, roles=st.sampled_from(["1x1", "2x1"]))
def test_a_journal_with_sessions_replays(jobs, roles) -> None:  # type: ignore[no-untyped-def]
    lines = recorded(jobs, roles, "distserve").splitlines()
    over = {**json.loads(lines[-1]), "kind": "end_session", "session": "a"}
    assert replay([*lines, json.dumps(over)], perf).differences == []


@pytest.mark.parametrize("routing", ["least_work", "unified"])
def test_the_next_turn_goes_where_its_pages_are(routing: str) -> None:
    """Other prompts pass through both instances while the tool runs, and overfill their pools."""
    others = [Arrival(0.5 + 0.1 * at, 500, 2) for at in range(60)]
    turn = Arrival(0.0, 400, 4, hash_ids=(1 << 33,), block=1 << 24)
    found = {}
    for session in ("", "a"):
        first = replace(turn, session=session)
        turns = [first, replace(first, prompt_tokens=450, after=0, delay=8.0)]
        options = Options(routing=routing, pages=440)
        report = simulate([*turns, *others], "sarathi", Mesh(2, colocated=True), TINY, options=options)
        found[session] = report.counters.prefix_hits
    assert found == {"": 0, "a": 400}
