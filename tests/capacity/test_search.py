"""The search finds what trying everything finds, and leaves nothing out that its bounds do not forbid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.capacity.answer import Answer, complete
from jaxserve.capacity.search import Rung, Searcher, Step, candidates, promoted
from jaxserve.capacity.trial import Candidate, Load, Outcome, Runner, Scale, Trial, loosest
from jaxserve.sched.sim import Mix, Options, Workload, simulate
from jaxserve.sched.sim.workload import Lengths, Rounds, Share
from tests.support.sched.presets import TINY

ONE = replace(TINY, noise=0.0)
TWO = replace(ONE.scaled(prefill=0.6, decode=0.6), tensor_parallel=2, kv_tokens=400)
FITS: Any = {tp: SimpleNamespace(fits=True) for tp in (1, 2)}
CHAT = Workload(
    "chat", Lengths("uniform", low=20, high=80), Lengths("uniform", low=2, high=6), ttft=0.06, tpot=0.01
)  # outputs are short, and so are simulations
LATE = replace(CHAT, name="late", prompt=Lengths("fixed", value=100), ttft=0.5, request_class="late")
MIXED = Mix("mixed", (Share(3, replace(CHAT, request_class="chat")), Share(1, LATE)))
DECODE = Workload("decode", Lengths("fixed", value=1), Lengths("fixed", value=20), ttft=1.0, tpot=0.00108)


_known: dict[str, Outcome] = {}


def load(source: Workload | Mix = CHAT, rate: float = 50.0, **more: Any) -> Load:
    return Load(source, rate, more.pop("requests", 64), **more)


def runner(given: Load) -> Runner:
    return Runner(given, {1: ONE, 2: TWO}, 16)


def several(devices: int, policies: Sequence[str] = ("distserve", "sarathi")) -> list[Candidate]:
    return list(candidates(devices, {tp: FITS[tp] for tp in FITS if devices % tp == 0}, policies, (64,)))


def outcome_of(given: Load, trial: Trial) -> Outcome:
    """Simulate a trial, once for all tests."""
    key = repr((given.source, trial))
    if key not in _known:
        _known[key] = runner(given)(trial)
    return _known[key]


def searcher(given: Load, told: list[Outcome | Step] | None = None) -> Searcher:
    run = runner(given)

    def each(trials: Sequence[Trial]) -> Iterable[Outcome]:
        return (outcome_of(given, trial) for trial in trials)

    return Searcher(given, each, run.bound, [].append if told is None else told.append)


QUESTIONS = [(CHAT, 60.0), (CHAT, 600.0), (MIXED, 200.0)]  # answers: one device, none, two devices


@pytest.mark.parametrize(("source", "rate"), QUESTIONS, ids=lambda one: str(getattr(one, "name", one)))
def test_the_search_costs_at_most_five_per_cent_more_than_trying_everything(source: Workload, rate: float) -> None:
    given = load(source, rate)
    every = [one for devices in (1, 2, 3) for one in several(devices)]
    assert len(every) <= 12
    outcomes = [outcome_of(given, Trial(one, given.requests, rate)) for one in every]
    keeping = [one for one in outcomes if one.attained >= given.goal]
    steps = list(searcher(given).fewest((1, 2, 3), several))
    if not keeping:
        assert not steps[-1].keeps(given.goal)
        return
    best, found = min(keeping, key=lambda one: (one.candidate.devices, -one.attained)), steps[-1].best
    assert found is not None and steps[-1].keeps(given.goal)
    assert found.candidate.devices <= 1.05 * best.candidate.devices
    assert found.attained >= best.attained - 0.05


@pytest.mark.parametrize("rate", [60.0, 600.0])
def test_no_simulation_exceeds_its_bound(rate: float) -> None:
    given = load(MIXED, rate)
    run = runner(given)
    for one in several(2):
        trial = Trial(one, given.requests, rate)
        bound, loose = run.bound(trial), run.bound(trial._replace(candidate=loosest(one, 512)))
        assert outcome_of(given, trial).attained <= bound + 1e-9 <= loose + 2e-9


def test_the_bound_rules_out_what_cannot_be_served() -> None:
    given, told = load(replace(CHAT, ttft=1e-4)), list[Outcome | Step]()
    (*_, step) = searcher(given, told).fewest((1, 2), several)
    assert step.best is None and step.bounded == step.tried and step.ceiling < 0.5
    assert not any(isinstance(one, Outcome) for one in told)


def test_stopping_a_simulation_early_loses_no_request_that_keeps_its_objectives() -> None:
    given = load(CHAT, 600.0)
    one = Candidate(1, 1, None, "sarathi", 64)
    arrivals, _ = given.arrivals(given.requests, given.rate)
    whole = simulate(arrivals, "sarathi", one.mesh, ONE, options=Options(tokens=64, rows=16))
    stopped = runner(given)(Trial(one, given.requests, given.rate))
    assert stopped.attained == whole.summary.attained < 0.9


def test_requests_that_the_model_cannot_hold_count_as_missed() -> None:
    rounds = replace(CHAT, rounds=Rounds(3, 1, 0.1, opening=Lengths("fixed", value=10)))
    given = load(rounds, 5.0, requests=20, longest=150)
    every, _ = replace(given, longest=1 << 40).arrivals(20, 5.0)
    left, share = given.arrivals(20, 5.0)
    assert 0 < share == len(left) / len(every) < 1
    assert all(one.prompt_tokens + one.output_tokens <= 150 for one in left)
    assert all(one.after is None or left[one.after].session == one.session for one in left)
    assert all(one.prompt_tokens > 10 for one in left)
    assert runner(given)(Trial(Candidate(1, 1, None, "sarathi", 64), 20, 5.0)).attained <= share
    first, _ = given.arrivals(5, 5.0)
    assert first == left[: len(first)] and sum(one.after is None for one in first) <= 5


def test_a_short_run_that_cannot_tell_leaves_no_mesh_out() -> None:
    """Outcomes from the best down; the margin is 0.15, two may go on, or four."""
    ranked = [
        Outcome(Trial(Candidate(instances, tp, prefill, policy, chunk), 64, 1.0), attained, {}, 0.1, 0.1, 1.0, 1.0)
        for instances, tp, prefill, policy, chunk, attained in (
            (1, 4, None, "unified", 8192, 1.0),
            (1, 4, None, "unified", 2048, 1.0),
            (1, 4, None, "sarathi", 8192, 1.0),
            (2, 2, None, "unified", 8192, 0.99),
            (2, 2, 1, "unified", 8192, 0.9),
            (4, 1, 1, "unified", 8192, 0.8),
        )
    ]
    every = [one.candidate for one in ranked]
    assert promoted(ranked, Rung(1 / 8, 8, 4, 0.15)) == [every[0], every[3], every[4], every[2]]
    assert promoted(ranked, Rung(1 / 8, 2, 2, 0.15)) == [every[0], every[3]]
    assert promoted(ranked, Rung(1 / 8, 8, 6, 0.15)) == [every[0], every[3], every[4], every[2], every[1], every[5]]


def test_equal_questions_have_equal_answers() -> None:
    found = []
    for _ in range(2):
        answer = Answer(0.9, 200.0, 2)
        complete(answer, searcher(load(MIXED, 200.0)), several, lambda tp: 0.2)
        found.append(answer)
        _known.clear()
    assert found[0] == found[1]
    assert found[0].best is not None and found[0].sustained and found[0].fewest is not None
    assert found[0].fewest <= found[0].best.candidate.devices <= (found[0].most or 99)


@pytest.mark.parametrize(
    ("source", "rate", "limit"),
    [
        (
            Workload("prompts", Lengths("fixed", value=100), Lengths("fixed", value=2), ttft=0.05, tpot=0.05),
            60.0,
            "prefill",
        ),
        (DECODE, 100.0, "decode"),
    ],
)
def test_the_limit_is_named(source: Workload, rate: float, limit: str) -> None:
    given = load(source, rate, requests=64)
    answer = Answer(given.goal, given.rate, 2)
    complete(answer, searcher(given), lambda n: several(n, ("sarathi",)) if n == 1 else [], lambda tp: 0.0)
    assert answer.limit == limit


def test_a_rate_that_nothing_keeps_names_what_would_do() -> None:
    given = load(CHAT, 300.0)
    answer = Answer(given.goal, given.rate, 1)
    complete(answer, searcher(given), several, lambda tp: 0.2)
    assert answer.best is None and answer.nearest is not None and answer.nearest.devices > 1
    assert answer.sustained is None or answer.sustained < given.rate


def test_candidates_suit_their_policies() -> None:
    made = several(3, ("unified", "distserve", "sarathi", "prefill=edf,decode=kairos"))
    assert {one.split for one in made if one.policy == "unified"} == {"colocated", "1P2D", "2P1D"}
    assert {one.prefill for one in made if one.policy == "sarathi"} == {None}
    assert None not in {one.prefill for one in made if one.policy == "distserve"}
    assert {one.devices for one in made} == {3}
    assert any(one.policy == "distserve" for one in several(1))


def test_scales_reach_the_step_times() -> None:
    truth, slow = ONE.solve(), ONE.scaled(prefill=2.0, decode=3.0).solve()
    assert (slow.prefill, slow.quadratic, slow.fixed, slow.context) == (
        2 * truth.prefill, 2 * truth.quadratic, 3 * truth.fixed, 3 * truth.context,
    )  # fmt: skip
    one = Candidate(1, 1, None, "sarathi", 64)
    plain, slower = (runner(load())(Trial(one, 64, 50.0, scale)).ttft for scale in (Scale(), Scale(2.0, 2.0)))
    assert slower > plain
