"""Policies that fill one step with prompts and decodes: contents of a step, and no idle time or lost requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.sched import policies
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.policy import Role, View
from jaxserve.sched.api.request import BEST_EFFORT, Request
from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.sched.perf.buckets import Buckets
from jaxserve.sched.perf.learned import LearnedModel
from jaxserve.sched.sim import Arrival, Latency, Mesh, Options, simulate
from tests.support.sched.colocated import EXACT, STEEP, decoding, prompt, view

DEVICE = Latency("test", kv_bytes_per_token=1000, kv_tokens=100_000, coefficients=EXACT)
NAMES = ["sarathi", "sarathi:tokens=3", "vllm", "vllm:tokens=5", "fairbatching", "fairbatching:anchor=arrival"]
NAMES += ["fairbatching:budget=fixed:4", "fairbatching:budget=fixed", "fairbatching:budget=tokens+on_time_set"]


def step(name: str, at: View) -> list[tuple[int, int]]:
    return [(grant.request, grant.tokens) for grant in policies.make(name).decide(at).grants]


# FairBatching: budget and groups


def test_the_budget_is_the_least_slack_less_the_margin() -> None:
    """Slack of 80 ms: 0.95 of it is 76 ms, less 10 ms fixed and 1 ms per row. Both rows are due within 80 + 50 ms."""
    at = view([prompt(0, 5000)], [decoding(1, 0.08), decoding(2, 0.12)])
    assert step("fairbatching", at) == [(1, 1), (2, 1), (0, 640)]
    assert step("fairbatching:use=1.0", at) == [(1, 1), (2, 1), (0, 680)]


def test_the_budget_is_never_less_than_the_tightest_tpot() -> None:
    for due in (0.001, -0.1):
        at = view([prompt(0, 5000)], [decoding(1, due)])
        assert step("fairbatching", at) == [(1, 1), (0, 364)]


def test_a_budget_that_keeps_no_row_in_time_does_not_hold() -> None:
    """Do not shorten a step if no row gains by it.

    That is so if rows are too late to catch up, if there are too many rows for their TPOT, or if a
    first token was late. The published rule shortens the step anyway.
    """
    late_first = decoding(1, 1.55, first=1.5)
    for rows in ([decoding(1, -2.0)], [decoding(id, 0.02) for id in range(1, 61)], [late_first]):
        at = view([prompt(0, 5000)], rows, now=1.5 if rows == [late_first] else 0.0)
        for name in ("fairbatching", "fairbatching:budget=fixed", "sarathi", "distserve"):
            assert dict(step(name, at)) == {0: 5000} | {one.id: 1 for one in rows}, name
    late = view([prompt(0, 5000)], [decoding(1, -2.0)])
    assert step("fairbatching:anchor=arrival", late) == [(1, 1), (0, 364)]


def test_rows_left_out_for_long_join_a_step() -> None:
    """The second row has infinite slack but last decoded a second ago, more than 4 TPOTs and 4 steps."""
    for name in ("fairbatching", "slos_serve"):
        for waited in (0.1, 1.0):
            rows = [decoding(1, 0.05), decoding(2, 9.0, tier=BEST_EFFORT)]
            rows[1].token_times = [-waited]
            ids = [id for id, _ in step(name, view([prompt(0, 5000, due=7.0)], rows))]
            assert (ids[:3] == [1, 2, 0]) == (waited == 1.0), name


def test_decodes_that_can_wait_a_step_come_after_prompts() -> None:
    """The budget is 80 ms: rows due before 80 + 50 ms are urgent, those due later are not."""
    decode = [decoding(1, 0.08), decoding(2, 0.129), decoding(3, 0.131)]
    assert step("fairbatching", view([prompt(0, 5000)], decode)) == [(1, 1), (2, 1), (0, 640)]
    assert step("fairbatching", view([prompt(0, 100)], decode)) == [(1, 1), (2, 1), (0, 100), (3, 1)]


def test_each_group_is_by_slack() -> None:
    decode = [decoding(1, 0.50), decoding(2, 0.08), decoding(3, 0.40), decoding(4, 0.10)]
    prompts = [prompt(5, 10, due=4.0), prompt(6, 10, due=2.0), prompt(7, 10, due=3.0)]
    assert [id for id, _ in step("fairbatching", view(prompts, decode))] == [2, 4, 6, 7, 5, 3, 1]


def test_urgent_rows_decode_even_beyond_the_budget() -> None:
    decode = [decoding(id, 0.02) for id in range(1, 36)]
    assert step("fairbatching", view([prompt(0, 100)], decode))[:35] == [(id, 1) for id in range(1, 36)]
    assert step("fairbatching", view([prompt(0, 100)], decode))[35:] in ([], [(0, 25)])


def test_the_others_decode_as_far_as_the_budget_goes() -> None:
    """0.95 x 60 ms: 10 fixed, 20 for the prompt, 1 for the urgent row; 26 others."""
    decode = [decoding(1, 0.06), *(decoding(id, 0.5 + id / 1000) for id in range(2, 50))]
    assert step("fairbatching", view([prompt(0, 200)], decode)) == [(1, 1), (0, 200), *((id, 1) for id in range(2, 28))]


def test_without_decodes_only_the_token_limit_bounds_a_step() -> None:
    at = view([prompt(0, 5000), prompt(1, 5000)], [], role=Role.PREFILL)
    assert step("fairbatching", at) == [(0, 5000), (1, 3192)]


def test_anchored_at_the_arrival_an_early_first_token_leaves_slack() -> None:
    """TTFT 1 s and the first token after 0.2 s: 0.8 s more than what is due."""
    at = view([prompt(0, 8000)], [decoding(1, 0.05, first=0.2)])
    assert step("fairbatching:use=1.0", at) == [(1, 1), (0, 390)]
    assert step("fairbatching:use=1.0+anchor=arrival", at) == [(1, 1), (0, 8000)]
    tight = view([prompt(0, 8000)], [decoding(1, 0.05, first=0.5)], perf=STEEP)
    assert step("fairbatching:use=1.0+anchor=arrival", tight)[1] == (
        0,
        5380,
    )  # 550 ms: 10 fixed, 1 for the row and 1 for its context


def test_a_fixed_budget_is_in_tokens_whatever_the_slack() -> None:
    """A step takes 22 ms, so rows due within 50 ms of its end are urgent. 47.5 ms of prompt tokens are 375 tokens."""
    at = view([prompt(0, 5000)], [decoding(1, 0.07), decoding(2, 3.0)])
    assert step("fairbatching:budget=fixed:100", at) == [(1, 1), (0, 99)]
    assert step("fairbatching:budget=fixed", at) == [(1, 1), (0, 374)]


def test_a_budget_in_tokens_is_blind_to_contexts() -> None:
    long = view([prompt(0, 5000)], [decoding(1, 0.08, context=3005)], perf=STEEP)
    usual = view([prompt(0, 5000)], [decoding(1, 0.08, context=995)], perf=STEEP)
    assert step("fairbatching:budget=tokens", long) == step("fairbatching:budget=tokens", usual) == [(1, 1), (0, 550)]
    assert step("fairbatching", usual) == [(1, 1), (0, 550)] and step("fairbatching", long) == [(1, 1), (0, 349)]


def test_late_prompts_go_first_by_slack_and_last_in_an_on_time_set() -> None:
    prompts = [prompt(0, 8000, due=-1.0), prompt(1, 2000, due=0.25), prompt(2, 3000, due=9.0)]
    assert [id for id, _ in step("fairbatching", view(prompts, []))] == [0, 1]
    assert step("fairbatching:on_time_set", view(prompts, [])) == [(1, 2000), (2, 3000), (0, 3192)]


# Sarathi and vLLM


def test_sarathi_decodes_everything_and_fills_up_with_prompts() -> None:
    at = view([prompt(0, 30), prompt(1, 300)], [decoding(2, 9.0), decoding(3, 0.01)])
    assert step("sarathi:tokens=100", at) == [(2, 1), (3, 1), (0, 30), (1, 68)]
    assert step("sarathi:tokens=1", at) == [(2, 1), (3, 1)]


def test_sarathis_own_budget_is_what_the_tightest_tpot_allows() -> None:
    """45 of 50 ms: 10 are fixed, 350 prompt tokens take the rest. The budget is constant, whatever decodes."""
    assert step("sarathi", view([prompt(0, 3000)], [decoding(1, 9.0)])) == [(1, 1), (0, 349)]
    assert step("sarathi:share=1.0", view([prompt(0, 3000)], [])) == [(0, 400)]
    assert step("sarathi", view([prompt(0, 3000)], [])) == [(0, 350)]
    assert step("sarathi", view([prompt(0, 9000)], [], role=Role.PREFILL)) == [(0, 8192)]


def test_a_budget_fills_a_padded_step_and_does_not_apply_if_no_step_is_fast_enough() -> None:
    """A padded step of up to 64 tokens costs 16.4 ms."""
    slow = LearnedModel(buckets=Buckets((1, 8), (64, 256)), coefficients=EXACT)
    for name in ("sarathi", "fairbatching:budget=fixed"):
        for tpot, tokens in ((0.019, 64), (0.010, 300)):
            late_decodes = prompt(0, 300)
            late_decodes.slo = SLO(ttft=8.0, tpot=tpot)
            assert step(name, view([late_decodes], [], perf=slow)) == [(0, tokens)], name


def test_vllm_schedules_whole_prompts_first_and_pauses_decodes() -> None:
    at = view([prompt(0, 5000), prompt(1, 3000), prompt(2, 300)], [decoding(3, 0.01)])
    assert [id for id, _ in step("vllm", at)][:2] == [0, 1]
    assert step("vllm", view([prompt(0, 5000, runs=True), prompt(1, 3300)], [decoding(3, 0.01)])) == [(0, 5000)]
    assert step("vllm", view([], [decoding(3, 0.01)])) == [(3, 1)]
    assert step("vllm", view([prompt(0, 9000, runs=True)], [])) == [(0, 8192)]


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


def test_a_running_request_is_planned_beside_prompts_that_may_find_no_pages() -> None:
    at = view([prompt(0, 50), prompt(1, 5000)], [decoding(2, 99.0), decoding(3, 98.0)])
    assert step("fairbatching:budget=fixed:60", at) == [(0, 50), (1, 10), (3, 1)]
    assert step("vllm", at) == [(0, 50), (1, 5000)]
    assert step("vllm", replace(at, role=Role.DECODE)) == [(0, 50), (1, 5000), (2, 1)]  # pages may be reserved


def test_a_slot_not_held_by_a_running_decode_is_not_assumed_free() -> None:
    """A finished prompt that waits for its transfer holds a slot: `vllm` then planned no decode and nothing ran."""
    at = view([prompt(0, 50)], [decoding(2, 99.0)])
    for name in ("vllm", "sarathi", "fairbatching"):
        assert step(name, replace(at, free_slots=0))[0] == (2, 1), name
    assert step("vllm", at) == [(0, 50)]


def test_requests_without_objectives_are_served() -> None:
    requests = [Request(id, range(100), SamplingParams(), NO_SLO, 0.0) for id in range(2)]
    for name in NAMES:
        assert step(name, view(requests, []))


# Laws


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
