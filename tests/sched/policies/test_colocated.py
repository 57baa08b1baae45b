"""Policies that fill one step with prompts and decodes: contents of a step, and no idle time or lost requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.sched import policies
from jaxserve.sched.api.policy import Role, View
from jaxserve.sched.api.request import BEST_EFFORT
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.perf.buckets import Buckets
from jaxserve.sched.perf.learned import LearnedModel
from jaxserve.sched.sim import Arrival, Latency, Mesh, Options, simulate
from tests.support.sched.colocated import EXACT, PERF, STEEP, decoding, prompt, view

DEVICE = Latency("test", kv_bytes_per_token=1000, kv_tokens=100_000, coefficients=EXACT)
NAMES = ["sarathi", "sarathi:tokens=3", "vllm", "vllm:tokens=5", "fairbatching", "fairbatching:anchor=arrival"]
NAMES += ["fairbatching:budget=fixed:4", "fairbatching:budget=fixed", "fairbatching:budget=tokens+on_time_set"]


def step(name: str, at: View) -> list[tuple[int, int]]:
    return [(grant.request, grant.tokens) for grant in policies.make(name).decide(at).grants]


LONG = [prompt(0, 5000)]  # half a second
TWO = view(LONG, [decoding(1, 0.08), decoding(2, 0.12)])
GROUPS = [decoding(1, 0.50), decoding(2, 0.08), decoding(3, 0.40), decoding(4, 0.10)]
BY_SLACK = [prompt(5, 10, due=4.0), prompt(6, 10, due=2.0), prompt(7, 10, due=3.0)]
OTHERS = [decoding(1, 0.06), *(decoding(id, 0.5 + id / 1000) for id in range(2, 50))]
ONES = [(id, 1) for id in range(50)]
MANY = view([prompt(0, 5000), prompt(1, 3000), prompt(2, 300)], [decoding(3, 0.01)])
EARLY, TIGHT = (
    view([prompt(0, 8000)], [decoding(1, 0.05, first=at)], perf=perf) for at, perf in ((0.2, PERF), (0.5, STEEP))
)
FAR, NEAR = (view(LONG, [decoding(1, 0.08, context=tokens)], perf=STEEP) for tokens in (3005, 995))
WHOLE = view([prompt(0, 5000), prompt(1, 5000)], [], role=Role.PREFILL)
LATE = view([prompt(0, 8000, due=-1.0), prompt(1, 2000, due=0.25), prompt(2, 3000, due=9.0)], [])
RUNS = view([prompt(0, 5000, runs=True), prompt(1, 3300)], [decoding(3, 0.01)])
FIXED = view(LONG, [decoding(1, 0.07), decoding(2, 3.0)])
FULL = view([prompt(0, 30), prompt(1, 300)], [decoding(2, 9.0), decoding(3, 0.01)])
SHORT = view([prompt(0, 50), prompt(1, 5000)], [decoding(2, 99.0), decoding(3, 98.0)])
STEPS = {
    # FairBatching: rows due within the budget and a TPOT come first, then prompts, then other rows
    "the least slack less the margin": ("fairbatching", TWO, [(1, 1), (2, 1), (0, 640)]),
    "the whole slack": ("fairbatching:use=1.0", TWO, [(1, 1), (2, 1), (0, 680)]),
    "never less than the TPOT": ("fairbatching", view(LONG, [decoding(1, 0.001)]), [(1, 1), (0, 364)]),
    "nor for a late row": ("fairbatching", view(LONG, [decoding(1, -0.1)]), [(1, 1), (0, 364)]),
    "no budget keeps it in time": ("fairbatching", view(LONG, [decoding(1, -2.0)]), [(1, 1), (0, 5000)]),
    "the published rule": ("fairbatching:anchor=arrival", view(LONG, [decoding(1, -2.0)]), [(1, 1), (0, 364)]),
    "rows that can wait": ("fairbatching", view([prompt(0, 100)], [*GROUPS[:2], decoding(5, 0.131)]),
                           [(2, 1), (0, 100), (5, 1), (1, 1)]),
    "each group is by slack": ("fairbatching", view(BY_SLACK, GROUPS),
                               [(2, 1), (4, 1), (6, 10), (7, 10), (5, 10), (3, 1), (1, 1)]),
    "others as far as it goes": ("fairbatching", view([prompt(0, 200)], OTHERS), [(1, 1), (0, 200), *ONES[2:28]]),
    "without decodes": ("fairbatching", WHOLE, [(0, 5000), (1, 3192)]),
    "an early first token": ("fairbatching:use=1.0", EARLY, [(1, 1), (0, 390)]),
    "leaves slack from the arrival": ("fairbatching:use=1.0+anchor=arrival", EARLY, [(1, 1), (0, 8000)]),
    "550 ms less 12": ("fairbatching:use=1.0+anchor=arrival", TIGHT, [(1, 1), (0, 5380)]),
    "a number of tokens": ("fairbatching:budget=fixed:100", FIXED, [(1, 1), (0, 99)]),
    "a fixed budget": ("fairbatching:budget=fixed", FIXED, [(1, 1), (0, 374)]),
    "tokens are blind to contexts": ("fairbatching:budget=tokens", FAR, [(1, 1), (0, 550)]),
    "as of a short one": ("fairbatching:budget=tokens", NEAR, [(1, 1), (0, 550)]),
    "the model is not": ("fairbatching", FAR, [(1, 1), (0, 349)]),
    "late prompts first": ("fairbatching", LATE, [(0, 8000), (1, 192)]),
    "or last": ("fairbatching:on_time_set", LATE, [(1, 2000), (2, 3000), (0, 3192)]),
    "a slow prompt": ("fairbatching:budget=fixed:60", SHORT, [(0, 50), (1, 10), (3, 1)]),
    # Sarathi: all rows, then prompts up to a constant budget, by default what the tightest TPOT allows
    "decodes, then prompts": ("sarathi:tokens=100", FULL, [(2, 1), (3, 1), (0, 30), (1, 68)]),
    "decodes only": ("sarathi:tokens=1", FULL, [(2, 1), (3, 1)]),
    "45 of 50 ms": ("sarathi", view([prompt(0, 3000)], [decoding(1, 9.0)]), [(1, 1), (0, 349)]),
    "50 ms": ("sarathi:share=1.0", view([prompt(0, 3000)], []), [(0, 400)]),
    "whatever decodes": ("sarathi", view([prompt(0, 3000)], []), [(0, 350)]),
    "on a prefill instance": ("sarathi", view([prompt(0, 9000)], [], role=Role.PREFILL), [(0, 8192)]),
    # vLLM: whole prompts first
    "prompts pause decodes": ("vllm", MANY, [(0, 5000), (1, 3000)]),
    "no room for another": ("vllm", RUNS, [(0, 5000)]),
    "decodes alone": ("vllm", view([], [decoding(3, 0.01)]), ONES[3:4]),
    "a long prompt": ("vllm", view([prompt(0, 9000, runs=True)], []), [(0, 8192)]),
    "free pages": ("vllm", SHORT, [(0, 50), (1, 5000)]),
    "pages may be reserved": ("vllm", replace(SHORT, role=Role.DECODE), [(0, 50), (1, 5000), (2, 1)]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "at", "granted"), STEPS.values(), ids=STEPS)
def test_a_step_by_hand(name: str, at: View, granted: list[tuple[int, int]]) -> None:
    """Compare one step with hand computation: 10 ms, 0.1 ms per prompt token and 1 ms per row."""
    assert step(name, at) == granted


@pytest.mark.parametrize("waited", [0.1, 1.0])
@pytest.mark.parametrize("name", ["fairbatching", "slos_serve"])
def test_rows_left_out_for_long_join_a_step(name: str, waited: float) -> None:
    """The second row has infinite slack but last decoded a second ago, more than 4 TPOTs and 4 steps."""
    rows = [decoding(1, 0.05), decoding(2, 9.0, tier=BEST_EFFORT)]
    rows[1].token_times = [-waited]
    ids = [id for id, _ in step(name, view([prompt(0, 5000, due=7.0)], rows))]
    assert (ids[:3] == [1, 2, 0]) == (waited == 1.0)


def test_urgent_rows_decode_even_beyond_the_budget() -> None:
    granted = step("fairbatching", view([prompt(0, 100)], [decoding(id, 0.02) for id in range(1, 36)]))
    assert granted[:35] == ONES[1:36] and granted[35:] in ([], [(0, 25)])


def test_a_budget_fills_a_padded_step_and_does_not_apply_if_no_step_is_fast_enough() -> None:
    """A padded step of up to 64 tokens costs 16.4 ms."""
    slow = LearnedModel(buckets=Buckets((1, 8), (64, 256)), coefficients=EXACT)
    for name in ("sarathi", "fairbatching:budget=fixed"):
        for tpot, tokens in ((0.019, 64), (0.010, 300)):
            late_decodes = prompt(0, 300)
            late_decodes.slo = SLO(ttft=8.0, tpot=tpot)
            assert step(name, view([late_decodes], [], perf=slow)) == [(0, tokens)], name


@pytest.mark.parametrize("name", NAMES)
def test_best_effort_comes_last(name: str) -> None:
    prompts = [prompt(0, 2, due=-9.0, tier=BEST_EFFORT), prompt(1, 2)]
    decode = [decoding(2, -9.0, tier=BEST_EFFORT), decoding(3, 9.0)]
    granted = [id for id, _ in step(name, view(prompts, decode))]
    standard = [granted.index(id) for id in (1, 3) if id in granted]
    assert standard and granted[: len(standard)] == [id for id in granted if id in (1, 3)]
    alone = [id for id, _ in step(name, view(prompts[:1], decode[:1]))]
    assert alone and set(alone) <= {0, 2}


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_without_pages_does_not_displace_a_running_one(name: str) -> None:
    at = view([prompt(0, 4000, due=-5.0), prompt(1, 4, runs=True)], [decoding(2, 99.0)], free_pages=100)
    granted = step(name, at)
    assert granted[0][0] in (1, 2) and {id for id, _ in granted} & {1, 2}


def test_a_slot_not_held_by_a_running_decode_is_not_assumed_free() -> None:
    """A finished prompt that waits for its transfer holds a slot: `vllm` then planned no decode and nothing ran."""
    at = view([prompt(0, 50)], [decoding(2, 99.0)])
    for name in ("vllm", "sarathi", "fairbatching"):
        assert step(name, replace(at, free_slots=0))[0] == (2, 1), name
    assert step("vllm", at) == [(0, 50)]


def test_slack_of_running_decodes_absorbs_a_burst_of_prompts() -> None:
    """Serve a burst of 2,000 prompt tokens beside four rows that have slack.

    The rows have decoded for a second at 14 ms a token with a TPOT of 50 ms. FairBatching computes
    the burst at once, Sarathi spreads it over several steps, and vLLM stops the rows for longer
    than their TPOT.
    """
    early = [Arrival(0.0, 10, 120, SLO(1.0, 0.05)) for _ in range(4)]
    burst = [Arrival(1.0, 500, 5, SLO(0.25, 0.05)) for _ in range(4)]
    met = {}
    for name in ("fairbatching", "sarathi", "vllm"):
        found = simulate([*early, *burst], name, Mesh(1), DEVICE, options=Options(perf="exact"))
        met[name] = sum(one.attained for one in found.measured[4:]), sum(one.worst_attained for one in found.measured)
        assert found.summary.count == 8
    assert met["fairbatching"][0] == 4 and met["sarathi"][0] < 4
    assert met["fairbatching"][1] == 8
