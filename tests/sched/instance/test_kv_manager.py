"""Sharing of cached prefixes, and the pages and slots that count as occupied."""

from __future__ import annotations

import pytest

from jaxserve.sched import policies
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import StepPlan, StepResult
from jaxserve.sched.api.policy import Limits, Role
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.block_pool import BlockPool
from jaxserve.sched.instance.kv_manager import KVManager
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.perf.model import GeneralModel
from tests.support.sched.harness import COEFFICIENTS

SIZE, PAGES, ROWS = 4, 16, 4
PROMPT = list(range(100, 114))  # three full pages and two tokens


def request(id: int, prompt: list[int] = PROMPT, salt: bytes = b"", **params: object) -> Request:
    return Request(id, NewRequest(prompt, SamplingParams(max_tokens=8, **params), SLO(), salt=salt), 0.0)  # type: ignore[arg-type]


def memory() -> KVManager:
    return KVManager(BlockPool(PAGES, SIZE), ROWS)


def served(memory: KVManager, one: Request) -> int:
    """Admit a request, compute its prompt and release it; return the number of its cached tokens."""
    assert memory.admit(one, 0)
    found = one.computed
    memory.register(one, found, one.prompt_length)
    memory.vacate(one)
    return found


def scheduler(role: Role = Role.MIXED, tokens: int = 32) -> Scheduler:
    limits = Limits(tokens, ROWS, PAGES, SIZE)
    return Scheduler(policies.make("distserve"), GeneralModel(COEFFICIENTS), limits, role)


def step(one: Scheduler, **result: object) -> StepPlan:
    """Plan a step and settle it with token 7 for each sampling span, or with the given fields of the result."""
    plan = one.plan(0.0, 0.0)
    assert plan is not None
    fields = {"tokens": tuple((7,) if span.samples else () for span in plan.spans), **result}
    one.settle(StepResult(plan.step, 0.0, 1.0, **fields))  # type: ignore[arg-type]
    return plan


def test_a_prefix_is_found_only_by_requests_with_the_same_salt() -> None:
    pool = memory()
    assert served(pool, request(0, salt=b"one tenant")) == 0
    assert served(pool, request(1, salt=b"another")) == 0
    assert served(pool, request(2)) == 0
    assert [served(pool, request(3 + i, salt=salt)) for i, salt in enumerate((b"one tenant", b"another", b""))] == [
        12
    ] * 3
    longer = [*PROMPT, 1, 2, 3, 4]
    assert served(pool, request(6, longer, b"a third")) == 0 and served(pool, request(7, longer, b"another")) == 12


def test_prompt_logprobs_disable_the_prefix_cache() -> None:
    """Every position of the prompt is recomputed, or its log-probability would be missing."""
    pool = memory()
    served(pool, request(0))
    assert served(pool, request(1, prompt_logprobs=0)) == 0
    assert served(pool, request(2)) == 12


def test_a_row_with_nonfinite_logits_leaves_no_cached_prefix() -> None:
    """Its first chunk filled pages that were cached before its last chunk failed."""
    one = scheduler(tokens=8)
    one.add(request(0))
    step(one)
    assert one.cached_tokens(request(1)) == 8
    step(one, tokens=((),), failed={0: "the logits are not finite"})
    assert len(one) == 0 and one.blocks.held == 0
    again = request(2)
    one.add(again)
    assert one.cached_tokens(again) == 0 and step(one).spans[0].start == 0


@pytest.mark.parametrize("at", [1, 5, 9])
def test_cached_pages_that_a_failing_row_shared_stay_cached(at: int) -> None:
    """Pages computed by other requests were finite: only pages filled by the failing row are removed."""
    one = scheduler()
    one.add(request(0, PROMPT[:at]))
    while len(one):
        step(one)
    longer = request(1)
    one.add(longer)
    kept = one.cached_tokens(longer)
    step(one, tokens=((),), failed={0: "the logits are not finite"})
    assert kept == at // SIZE * SIZE == one.cached_tokens(request(2))


def test_a_reservation_is_not_a_running_request() -> None:
    one = scheduler(Role.DECODE)
    coming = request(0)
    coming.pages = [3, 1, 2, 0]  # page ids on the instance that computes its prompt
    reservation = one.reserve(coming)
    assert reservation is not None and (one.running, one.waiting, one.blocks.held) == (0, 0, 4)
    one.add(request(1))
    assert (one.running, one.waiting) == (0, 1)
    step(one)
    assert (one.running, one.waiting) == (1, 0)
    one.unreserve(reservation)
    assert (one.running, one.waiting) == (1, 0)
    one.check()


def test_no_pages_are_taken_from_a_request_in_the_running_step() -> None:
    """Wait for the running step before dropping the KV of a request in it.

    A pool of five pages is full, and the first request needs a sixth. When the running step has
    ended, the KV of the request that ranks last is dropped.
    """
    one = Scheduler(policies.make("distserve"), GeneralModel(COEFFICIENTS), Limits(32, 2, 5, SIZE))
    first, last = request(0, list(range(7))), request(1, list(range(50, 58)))
    one.add(first)
    one.add(last)
    step(one)
    running = one.plan(0.0, 0.0)
    assert running is not None and len(running.spans) == 2 and one.blocks.available == 0
    ahead = one.plan(0.0, 0.0)
    assert ahead is not None and [span.request for span in ahead.spans] == [1]
    assert (len(first.pages), len(last.pages), one.counters.preemptions) == (2, 3, 0)
    for plan in (running, ahead):
        one.settle(StepResult(plan.step, 0.0, 1.0, ((7,),) * len(plan.spans)))
        one.check()
    plan = one.plan(0.0, 0.0)
    assert plan is not None and [span.request for span in plan.spans] == [0]
    assert (len(first.pages), last.pages) == (3, [])
    one.check()
