"""The SLOs-Serve policy: promises are kept, other requests use the remaining capacity, and decisions are fast."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from jaxserve.sched.api.new_request import STANDARD, NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.policy import Decision, Limits, Role, View
from jaxserve.sched.api.request import BEST_EFFORT, Request, State
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.block_pool import BlockPool
from jaxserve.sched.instance.kv_manager import KVManager
from jaxserve.sched.instance.prefix_hits import PrefixHits
from jaxserve.sched.instance.request_queues import RequestQueues
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.policies.slos_serve.policy import SlosServe
from jaxserve.sched.sim import Arrival, Latency, Mesh, Options, simulate
from tests.support.sched.cost import calls
from tests.support.sched.harness import COEFFICIENTS

DEVICE = Coefficients(fixed=10e-3, prefill=1e-4, decode=5e-5, quadratic=0, longest=0, context=0)


def filed(requests: list[Request], role: Role = Role.MIXED) -> RequestQueues:
    queues = RequestQueues(role, PrefixHits(KVManager(BlockPool(1, 16), 1)))
    for one in requests:
        queues.requests[one.id] = one
        queues.file(one)
    return queues


def view(requests: list[Request], now: float = 0.0, **more: object) -> View:
    """Return the policy's view of the current requests."""
    limits = more.pop("limits", Limits(tokens=8192, rows=256, pages=100_000, page_size=16, draft=0))
    role = more.pop("role", Role.MIXED)
    perf = more.pop("perf", GeneralModel(DEVICE, correct=False))
    assert isinstance(limits, Limits) and isinstance(role, Role) and isinstance(perf, GeneralModel)
    queues = filed(requests, role)
    free = limits.pages - sum(-(-one.computed // limits.page_size) for one in requests)
    slots = limits.rows - sum(one.state is State.RUNNING for one in requests)
    return View(now, now, role, queues.prefill, queues.decode, limits, free, slots, 0, perf, **more)  # type: ignore[arg-type]


def waiting(id: int, prompt: int, ttft: float, tpot: float = 0.05, tier: str = STANDARD, at: float = 0.0) -> Request:
    slo = SLO(ttft=ttft, tpot=tpot)
    return Request(id, NewRequest(range(prompt), SamplingParams(max_tokens=None), slo, tier=tier), at)


def decoding(
    id: int,
    prompt: int,
    tpot: float = 0.05,
    tier: str = STANDARD,
    *,
    first: float = 0.0,
    last: float = 0.0,
    out: int = 1,
) -> Request:
    """Return a row that got its first token at `first` and token number `out` at `last`."""
    one = waiting(id, prompt, 1.0, tpot, tier, first - 0.5)
    one.state, one.computed = State.RUNNING, prompt + out - 1
    one.output, one.token_times = [1] * out, [*np.linspace(first, last, out).tolist()]
    one.first_token_at, one.budget = first, out * tpot
    return one


def granted(decision: Decision) -> dict[int, int]:
    return {grant.request: grant.tokens for grant in decision.grants}


# ---- one step --------------------------------------------------------------------------------------
# ------------------


def test_prompts_by_deadline_and_declined_ones_last() -> None:
    """5,000 tokens take half a second: the third prompt cannot be in time and is served after the others."""
    requests = [waiting(0, 9000, 3.0), waiting(1, 500, 1.0), waiting(2, 5000, 0.3)]
    decision = SlosServe().decide(view(requests))
    assert decision.demote == (2,)
    assert [grant.request for grant in decision.grants][:2] == [1, 0]
    assert 2 not in granted(decision), "best effort ran before promised prompts that fill the step"


def test_a_promise_that_cannot_be_kept_is_void() -> None:
    policy = SlosServe()
    old = waiting(0, 5000, 1.0)
    assert policy.decide(view([old])).demote == ()
    assert policy.decide(view([old], now=0.4)).demote == ()
    decision = policy.decide(view([old], now=0.6))
    assert decision.demote == (0,) and granted(decision)[0] > 0, (
        "an unpromised request is served from the remaining capacity at once"
    )


def test_a_loose_row_waits_for_the_step_in_which_it_is_due() -> None:
    """With steps of 47.5 ms, a row of 200 ms that just got a token waits until only one more step fits."""
    prompt = waiting(2, 5000, 30.0)
    policy = SlosServe()
    early = policy.decide(view([decoding(0, 10), decoding(1, 10, 0.2), prompt]))
    assert list(granted(early)) == [0, 2, 1], "the row decodes in the time that the prompt leaves"
    rows = [decoding(0, 10, first=0.12, last=0.12), decoding(1, 10, 0.2), prompt]
    assert list(granted(policy.decide(view(rows, now=0.12)))) == [1, 0, 2]


def test_a_step_that_ends_a_prompt_ends_by_its_deadline() -> None:
    """The first prompt takes 40 of its 60 ms alone: the second gets the rest, not a step of the full length."""
    seen = view([waiting(0, 300, 0.06), waiting(1, 5000, 30.0)])
    assert granted(SlosServe(block=0.25).decide(seen)) == {0: 300, 1: 192}
    assert granted(SlosServe().decide(seen)) == {0: 300}, "a step of the full length leaves nothing"


def test_prompts_that_wait_for_pages_do_not_block_others() -> None:
    """The step goes to requests that can run. Of those that wait for pages, only the first is named."""
    limits = Limits(tokens=8192, rows=256, pages=200, page_size=16)
    running = waiting(0, 3000, 30.0)
    running.state, running.computed = State.RUNNING, 64
    requests = [running, waiting(1, 3300, 20.0), waiting(2, 3300, 20.0)]
    seen = replace(view(requests, limits=limits), free_pages=12)
    decision = SlosServe(admit=False).decide(seen)
    assert granted(decision)[0] > 2000 and len(granted(decision)) == 2


# ---- speculation ---------------------------------------------------------------------------------------------------

DRAFTER = GeneralModel(replace(DEVICE, fixed=20e-3, draft=1e-3), correct=False)
DRAFTS = Limits(tokens=8192, rows=256, pages=100_000, page_size=16, draft=4)


def test_drafts_make_steps_longer_and_prompts_larger() -> None:
    rows = [decoding(one, 10, first=-1.45, last=0.0, out=30) for one in range(5)]
    seen = view([*rows, waiting(9, 50_000, 100.0)], limits=DRAFTS, perf=DRAFTER, acceptance=0.8)
    with_drafts, without = SlosServe().decide(seen), SlosServe(spec=False).decide(seen)
    drafts = {grant.draft for grant in with_drafts.grants if grant.request < 5}
    assert len(drafts) == 1 and min(drafts) >= 1
    assert all(grant.draft == 0 for grant in without.grants)
    assert granted(with_drafts)[9] > 1.4 * granted(without)[9]
    assert granted(SlosServe(caution=0.0).decide(seen))[9] > granted(with_drafts)[9]
    seen = replace(seen, acceptance=0.02)
    assert all(grant.draft == 0 for grant in SlosServe().decide(seen).grants)


def test_without_dynamic_size_no_step_exceeds_the_tightest_tpot_seen() -> None:
    policy, dynamic = SlosServe(dynamic=False), SlosServe()
    tight, loose = [decoding(0, 10), waiting(1, 5000, 30.0)], [decoding(2, 10, 0.1), waiting(1, 5000, 30.0)]
    assert granted(policy.decide(view(tight)))[1] == granted(dynamic.decide(view(tight)))[1] == 320
    assert granted(policy.decide(view(loose)))[1] == 320 and granted(dynamic.decide(view(loose)))[1] == 832


# ---- whole runs ----------------------------------------------------------------------------------------------------

TINY = Latency(name="tiny", kv_bytes_per_token=1000, kv_tokens=4000, page_size=4, coefficients=COEFFICIENTS, noise=0.05)


def arrivals(count: int, rate: float, seed: int = 0) -> list[Arrival]:
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1 / rate, count)).tolist()
    tiers = [SLO(0.02, 0.004), SLO(0.05, 0.008)]
    return [
        Arrival(at, int(random.integers(5, 60)), int(random.integers(2, 40)), tiers[index % 2], f"tier{index % 2}")
        for index, at in enumerate(times)
    ]


def test_promises_are_kept_if_predictions_are_exact() -> None:
    """At twice the sustainable load, promised requests attain their SLOs and all others finish."""
    demoted: set[int] = set()

    class Watched(SlosServe):
        def decide(self, view: View) -> Decision:
            decision = super().decide(view)
            demoted.update(decision.demote)
            return decision

    load = arrivals(300, 900.0)
    report = simulate(load, Watched, Mesh(1), replace(TINY, noise=0.0), options=Options(perf="exact"))
    promised = [one for one in report.measured if one.id not in demoted]
    assert report.summary.reasons == {"stop": 300}
    assert 60 < len(promised) < 280
    kept = sum(one.attained for one in promised) / len(promised)
    assert kept > 0.97
    blind = simulate(load, "distserve", Mesh(1), replace(TINY, noise=0.0)).summary
    assert report.summary.attained > 1.3 * blind.attained


def test_every_request_is_served_with_drafts_and_scarce_pages() -> None:
    load = arrivals(120, 500.0, seed=3)
    options = Options(draft=3, acceptance=0.6)
    report = simulate(load, "slos_serve:no-admit", Mesh(1), replace(TINY, kv_tokens=300), options=options)
    assert report.summary.reasons == {"stop": 120}
    assert [one.output for one in sorted(report.measured)] == [one.output_tokens for one in load]


# ---- cost -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "prompts", "most"), [(64, 256, 600), (512, 4096, 1300)])
def test_decisions_are_fast(rows: int, prompts: int, most: int) -> None:
    """Bound the calls of the median decision, with a new request at every fourth."""
    random = np.random.default_rng(0)

    def new(id: int, tier: str) -> Request:
        return waiting(id, int(random.integers(100, 2000)), 0.8, tier=tier)

    requests = [decoding(one, int(random.integers(100, 2000)), 0.1) for one in range(rows)]
    requests += [new(rows + one, BEST_EFFORT) for one in range(prompts)]
    queues, policy, taken = filed(requests), SlosServe(), []
    limits = Limits(tokens=8192, rows=1024, pages=1 << 20, page_size=16)
    perf = GeneralModel(DEVICE, correct=False)
    for step in range(24):
        if step % 4 == 0:
            coming = queues.requests[10_000 + step] = new(10_000 + step, STANDARD)
            queues.file(coming)
        now = 0.002 * step
        seen = View(now, now, Role.MIXED, queues.prefill, queues.decode, limits, 1 << 19, 1024 - rows, 0, perf)
        made: list[Decision] = []
        taken.append(calls(lambda seen=seen, made=made: made.append(policy.decide(seen))))
        for id in made[0].demote:
            queues.demote(id)
    assert median(taken) <= most, taken


def test_the_set_of_the_highest_value_is_promised() -> None:
    """In five seconds fit one prompt of five or two of two; promises made earlier are kept.

    The two are promised unless the one has a priority two lower.
    """
    for priority, demoted in ((0, (0,)), (-1, (0,)), (-2, (1, 2)), (3, (0,))):
        rivals = [waiting(0, 48_000, 5.0), waiting(1, 19_000, 5.0), waiting(2, 19_000, 5.0)]
        rivals[0].priority = priority
        policy = SlosServe()
        assert sorted(policy.decide(view(rivals)).demote) == list(demoted)
        later = waiting(9, 30_000, 5.0)
        later.priority = -20
        kept = [one for one in rivals if one.id not in demoted]
        assert policy.decide(view([*kept, later])).demote == (9,)
