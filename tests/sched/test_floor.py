"""The throughput floor: a policy leaves rows out, or cuts prompts for them, only if some row gains by it.

The bare run takes a few of the cells of policy, latency preset and regime, so that each of them is
met; `-m full` runs the whole matrix, and split instances.
"""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import load_yaml, preset
from jaxserve.sched import policies
from jaxserve.sched.api.policy import Role, View
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.sched.feasibility import JOINING, PATIENCE, keeps_objectives, starved
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.sim.floor import CPU, REGIMES, Floor, floor, kept, plain
from jaxserve.sched.sim.latency import Latency
from tests.support.examples import examples
from tests.support.sched.colocated import STEEP, decoding, prompt, view

VARIANTS = [
    "fairbatching:budget=fixed",
    "fairbatching:budget=tokens",
    "fairbatching:on_time_set",
    "prefill=sedf,decode=kairos",
    "slos_serve:no_admit",
]
POLICIES = [*policies.names(), *VARIANTS]
PRESETS = [CPU.name, *sorted(file.stem for file in preset("latency", "llama3-8b-a800").parent.glob("*.yaml"))]
CELLS = [(policy, PRESETS[at % len(PRESETS)], REGIMES[at % len(REGIMES)]) for at, policy in enumerate(POLICIES)]
MATRIX = [(policy, name, regime) for policy in POLICIES for name in PRESETS for regime in REGIMES]


@cache
def latency_of(name: str) -> Latency:
    return CPU if name == CPU.name else load_yaml(preset("latency", name), Latency)


@cache
def base(name: str, regime: str, split: bool, seed: int = 0) -> Floor:
    return floor(plain(split), latency_of(name), regime, split=split, seed=seed)


def check(policy: str, name: str, regime: str, *, split: bool = False, seed: int = 0) -> None:
    found, least = floor(policy, latency_of(name), regime, split=split, seed=seed), base(name, regime, split, seed)
    assert kept(found, least), f"{found} are less than {least}"
    if policy != "vllm":  # prompts first: its rows wait for all of them
        assert found.gap <= (PATIENCE + JOINING) * found.full, found


def test_the_sample_meets_every_policy_preset_and_regime() -> None:
    seen = [set(column) for column in zip(*CELLS, strict=True)]
    assert seen == [set(POLICIES), set(PRESETS), set(REGIMES)]


@pytest.mark.parametrize(("policy", "name", "regime"), CELLS)
def test_no_policy_falls_below_the_floor(policy: str, name: str, regime: str) -> None:
    check(policy, name, regime)


@pytest.mark.full
@pytest.mark.parametrize(("policy", "name", "regime"), MATRIX)
def test_no_policy_falls_below_the_floor_anywhere(policy: str, name: str, regime: str) -> None:
    check(policy, name, regime)


@pytest.mark.full
@pytest.mark.parametrize("name", [CPU.name, "llama3-8b-a800", "minimax-m2.5-h200-tp4"])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_falls_below_the_floor_on_split_instances(policy: str, name: str) -> None:
    for regime in REGIMES:
        check(policy, name, regime, split=True)


def hopeless(id: int, why: str, late: float) -> Request:
    """Return a row that cannot keep its objectives at 1.5 s, with steps of at least 11 ms and a TPOT of 50 ms."""
    if why == "late first token":
        return decoding(id, 1.5 + late, first=1.2)
    if why == "far behind":
        return decoding(id, 1.0 - late, first=0.1)
    row = decoding(id, 1.5, first=0.1)
    row.slo = NO_SLO if why == "none" else SLO(1.0, 0.005)
    return row


@given(
    reasons=st.lists(
        st.tuples(st.sampled_from(["late first token", "far behind", "none", "below"]), st.floats(0.0, 0.4)),
        min_size=1,
        max_size=60,
    ),
    prompts=st.lists(st.integers(1, 900), min_size=1, max_size=6),
    due=st.sampled_from([1.0, 60.0]),
)
@settings(max_examples=examples(60))
def test_if_no_row_can_gain_everything_runs(reasons: list[tuple[str, float]], prompts: list[int], due: float) -> None:
    for name in POLICIES:
        rows = [hopeless(id, *reason) for id, reason in enumerate(reasons)]
        waiting = [prompt(100 + id, tokens, due) for id, tokens in enumerate(prompts)]
        decision = policies.make(name).decide(view(waiting, rows, now=1.5, start=1.5))
        granted = {grant.request: grant.tokens for grant in decision.grants}
        whole = [granted.get(one.id) == one.remaining for one in waiting]
        if name == "vllm":
            assert all(whole)
            continue
        assert {row.id for row in rows} <= set(granted), name
        assert any(whole) if "flowprefill" in name else all(whole), name  # it computes one prompt at a time


def test_published_variants_may_cut_prompts_and_leave_rows_out_without_gain() -> None:
    behind = view([prompt(0, 5000)], [decoding(1, -2.0)])
    rows = [decoding(1, 9.0), decoding(2, 9.0, context=9000)]
    for row in rows:
        row.slo = NO_SLO
    steep = view([], rows, role=Role.DECODE, perf=STEEP)

    def named(name: str, at: View) -> list[tuple[int, int]]:
        return sorted((grant.request, grant.tokens) for grant in policies.make(name).decide(at).grants)

    assert named("fairbatching", behind) == [(0, 5000), (1, 1)]
    assert named("fairbatching:anchor=arrival", behind) == [(0, 364), (1, 1)]
    assert named("kairos", steep) == [(1, 1), (2, 1)]
    assert named("kairos:literal", steep) == [(1, 1)]


def test_a_row_keeps_its_objectives_if_it_is_on_time_or_catches_up() -> None:
    def kept_in(row: Request, seconds: float, now: float = 0.0) -> bool:
        return keeps_objectives(view([], [row]).decode, now, seconds)

    assert kept_in(decoding(0, 0.05), 0.05) and not kept_in(decoding(0, 0.05), 0.06)
    assert kept_in(decoding(0, 0.2), 0.1), "the row is ahead"
    assert kept_in(decoding(0, -0.1), 0.04) and not kept_in(decoding(0, -0.1), 0.0499), (
        "100 tokens are too few to catch up"
    )
    assert not kept_in(decoding(0, -0.5), 0.001), "the row is late by more than 8 TPOTs"
    assert not kept_in(decoding(0, 9.0, tier="best_effort"), 0.01)
    late = decoding(0, 2.0, first=1.5)
    assert not kept_in(late, 0.01, 1.5) and kept_in(decoding(0, 2.0, first=0.9), 0.01, 1.5)
    gaps = decoding(0, 9.0)
    gaps.slo = SLO(1.0, 0.05, tbt=0.03)
    assert kept_in(gaps, 0.03) and not kept_in(gaps, 0.04)
    gaps.slo = NO_SLO
    assert not kept_in(gaps, 0.0)


@given(st.lists(st.tuples(st.floats(-0.5, 0.5), st.booleans(), st.booleans()), max_size=12), st.floats(0.001, 0.2))
def test_one_of_many_rows_that_keeps_its_objectives_is_enough(made: list[tuple[float, bool, bool]], seconds: float):
    rows = [
        decoding(id, slack, first=0.5 if began else 1.5, tier="best_effort" if best else "standard")
        for id, (slack, began, best) in enumerate(made)
    ]
    alone = [keeps_objectives(view([], [row]).decode, 0.0, seconds) for row in rows]
    assert keeps_objectives(view([], rows).decode, 0.0, seconds) == any(alone)


def test_rows_left_out_rejoin_in_order_of_their_wait_a_few_at_a_time() -> None:
    rows = [decoding(id, 9.0) for id in range(9)]
    for row in rows:
        row.token_times = [-0.1 * row.id]

    def joining(seconds: float) -> list[int]:
        """Return the rows that rejoin if a step of all rows takes `seconds`."""
        perf = GeneralModel(Coefficients(seconds, 0.0, 0.0, 0.0, 0.0, 0.0), correct=False)
        at = view([], rows, role=Role.DECODE, perf=perf)
        return starved(at, at.decode.arrival.argsort(kind="stable")).tolist()

    assert joining(0.01) == [8, 7, 6], "a quarter of the rows without a token for more than 4 TPOTs"
    assert joining(0.15) == [8, 7, 6]
    assert joining(0.19) == [8] and not joining(9.0)
    for row in rows:
        row.slo = NO_SLO
    assert joining(0.15) == [8, 7, 6] and not joining(0.25), "rows without objectives rejoin after 4 steps"
    rows[0].slo, rows[0].token_times = SLO(1.0, 0.05), [-0.81]
    assert joining(0.19) == [0, 8], "rows with objectives beside rows without"
