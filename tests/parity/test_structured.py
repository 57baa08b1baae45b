"""No schedule changes the tokens of structured outputs, and every token is allowed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import cache

import pytest

from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.structured_outputs import StructuredOutputs
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
