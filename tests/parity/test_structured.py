"""No schedule changes the tokens of structured outputs, and every token is allowed."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import StepPlan
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.structured_outputs import StructuredOutputs
from jaxserve.structured.constraint import Constraint
from tests.support.examples import cases
from tests.support.parity.asks import ROOMY, TIGHT, Faults, begun, constrained, guessing, setup
from tests.support.parity.law import SPEC, Ask, assert_allowed, compare
from tests.support.parity.policies import Longest


@cache
def alone(seed: int) -> tuple[Request, ...]:
    return setup("1x1", 64, ROOMY).each(constrained(seed))


def allowed(requests: Sequence[Ask], served: Sequence[Request]) -> None:
    """Assert that masks allow every token, and that outputs that ended by themselves are whole."""
    for ask, request in zip(requests, served, strict=True):
        wanted = ask.params.structured_outputs
        if wanted is None:
            continue
        assert_allowed(ask, request.output)
        text = bytes(token for token in request.output if token != SPEC.eos[0]).decode()
        if request.finish_reason == "stop" and wanted.kind == "json":
            assert set(json.loads(text)) == {"a", "b", "c"}
        if request.finish_reason == "stop" and wanted.kind == "choice":
            assert text in wanted.choice


CASES = list(
    itertools.product(("1x1", "2x1", "2x2"), (16, 64), (ROOMY, TIGHT), ("distserve", "kairos", "unified"), (1, 2))
)
SAMPLE = [("1x1", 64, TIGHT, "unified", 1), ("2x1", 16, ROOMY, "kairos", 1), ("2x2", 64, TIGHT, "distserve", 1)]


@pytest.mark.parametrize("case", cases(SAMPLE, CASES), ids=str)
def test_no_schedule_changes_structured_outputs(case: tuple[str, int, int, str, int]) -> None:
    mesh, chunk, pages, policy, seed = case
    requests = constrained(seed)
    served, cluster = setup(mesh, chunk, pages).run(requests, policy)
    assert [request.error for request in served] == [None] * len(served)
    assert compare(requests, served, alone(seed)) <= 1
    allowed(requests, served)
    if mesh != "1x1":
        assert cluster.kv_transfers.transfers > 0, "no KV was transferred"


def test_outputs_end_and_are_valid() -> None:
    allowed(constrained(1), alone(1))
    ended = [one for ask, one in zip(constrained(1), alone(1), strict=True) if ask.params.structured_outputs]
    assert sum(one.finish_reason == "stop" for one in ended) > len(ended) // 2


def test_deflected_prompts_keep_their_constraints() -> None:
    served, _ = setup("2x1", 64, ROOMY).run(constrained(1), "unified", place="deflect:faster")
    assert compare(constrained(1), served, alone(1)) <= 1


def test_constraints_continue_on_another_engine() -> None:
    """Cut at any place, for example amid a key of an object."""
    served, _ = setup("2x1", 64, ROOMY).run(begun(constrained(1), alone(1)), "distserve")
    assert compare(constrained(1), served, alone(1)) <= 1
    allowed(constrained(1), served)


def test_constraints_survive_failed_steps() -> None:
    served, cluster = setup("1x1", 64, ROOMY).run(constrained(1), "unified", watch=Faults(9))
    assert cluster.cores[0].scheduler.counters.rebuilds > 0
    assert compare(constrained(1), served, alone(1)) <= 1


@pytest.mark.parametrize(("mesh", "policy"), [("1x1", "unified"), ("2x1", "distserve"), ("1x1", "draft")])
def test_masks_made_between_steps_change_no_token(monkeypatch: pytest.MonkeyPatch, mesh: str, policy: str) -> None:
    monkeypatch.setattr(Constraint, "late", True)
    executors, chosen = (guessing(), Longest) if policy == "draft" else (setup(mesh, 64, ROOMY), policy)
    served, cluster = executors.run(constrained(1), chosen)
    assert [request.error for request in served] == [None] * len(served)
    assert compare(constrained(1), served, alone(1)) <= 1
    allowed(constrained(1), served)
    rows = (request.output for ask, request in zip(constrained(1), served, strict=True) if ask.params.constrained)
    held = sum(core.scheduler.counters.held for core in cluster.cores)
    assert held >= sum(len(output) - 1 for output in rows)  # all but the last token


def test_other_rows_do_not_wait_for_a_slow_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that takes as long as another request needs for all of its tokens delays none of them."""
    over, waited, prepare = threading.Event(), [], Constraint.prepare

    def slow(constraint: Constraint, width: int) -> None:
        waited.append(over.wait(60))
        prepare(constraint, width)

    monkeypatch.setattr(Constraint, "late", True)
    monkeypatch.setattr(Constraint, "prepare", slow)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1)
    wanted = replace(params, structured_outputs=StructuredOutputs(regex="[a-z]{20}"))
    requests = [Ask((20, 30, 40), wanted), Ask((50, 60), replace(params, max_tokens=30))]
    steps = []

    def watch(plan: StepPlan) -> None:
        steps.append({span.request for span in plan.spans})
        if sum(1 in each for each in steps) >= 30:
            over.set()

    served, _ = setup("1x1", 64, ROOMY).run(requests, "unified", watch=watch)
    assert all(waited) and len(waited) >= 18  # two steps were planned before the first was known to be slow
    assert sum(each == {1} for each in steps) > 20  # in the meantime
    assert [len(request.output) for request in served] == [20, 30]


def test_drafts_are_checked() -> None:
    """Drafted tokens are accepted only if the constraint allows them."""
    served, cluster = guessing().run(constrained(1), Longest)
    counters = cluster.cores[0].scheduler.counters
    assert counters.drafted > 0
    assert compare(constrained(1), served, alone(1)) <= 1
    allowed(constrained(1), served)


def test_forced_tokens_are_taken_several_at_a_time() -> None:
    """The model agrees with tokens that are the only ones allowed, so a step gains all that are drafted."""
    wanted = StructuredOutputs(regex="[ab](a long text that is the same for each)")
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=1, structured_outputs=wanted)
    asks = [Ask((20, 30, 40), params)]
    served, cluster = guessing().run(asks, Longest)
    assert bytes(served[0].output[1:-1]).decode() == "a long text that is the same for each"
    counters = cluster.cores[0].scheduler.counters
    assert counters.accepted > 25 and counters.steps < 12  # of 39 tokens
    assert compare(asks, served, [setup("1x1", 64, ROOMY).run(asks)[0][0]]) == 0
