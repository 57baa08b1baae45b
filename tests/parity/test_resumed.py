"""A request that another engine has begun continues with the tokens that it would have had there."""

from __future__ import annotations

import pytest

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.new_request import NewRequest, Progress
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.request import ANSWER, THINKING, Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.api.thinking import ThinkingEnd
from tests.support.parity.asks import ROOMY, TIGHT, alone, asks, begun, setup
from tests.support.parity.law import compare


@pytest.mark.parametrize(("mesh", "pages", "policy"), [("1x1", TIGHT, "unified"), ("2x1", ROOMY, "distserve")])
def test_continuing_elsewhere_does_not_change_the_tokens(mesh: str, pages: int, policy: str) -> None:
    """All kinds of requests, cut at any place, continue together on other instances."""
    requests, whole = asks(1), alone(1)
    resumed = begun(requests, whole)
    assert sum(bool(ask.progress and ask.progress.output) for ask in resumed) > len(resumed) // 2
    served, cluster = setup(mesh, 64, pages).run(resumed, policy)
    assert compare(requests, served, whole) <= 1
    for ask, request in zip(resumed, served, strict=True):
        assert ask.progress is not None and len(request.token_times) == len(request.output)
        assert request.output[: len(ask.progress.output)] == list(ask.progress.output)
    assert cluster.ttft_predictions.accuracy["prefill"].count <= sum(
        not ask.progress.output for ask in resumed if ask.progress
    )


def made(stages: tuple[tuple[str, float], ...] = (), **params: object) -> Request:
    thinking = ThinkingEnd(((9,),)) if stages else None
    slo = SLO(1.0, 0.1, stages=stages)
    return Request(0, NewRequest((1, 2, 3), SamplingParams(**params), slo), 90.0, eos=frozenset({7}), thinking=thinking)  # type: ignore[arg-type]


def test_tokens_of_before_count_for_deadlines_and_limits() -> None:
    request = made(max_tokens=10)
    request.resume(Progress((5, 5, 5, 5), first=4.0, last=1.0, scored=2), 100.0)
    assert request.token_times == [96.0, 97.0, 98.0, 99.0] and request.first_token_at == 96.0
    assert request.deadline == pytest.approx(96.0 + 4 * 0.1)  # of the fifth token
    assert (request.generated, request.known, request.computed, request.scored) == (4, 7, 0, 2)


def test_thinking_that_ended_before_stays_ended() -> None:
    stages = (("thinking", 0.5),)
    thinking, answer = made(stages, max_tokens=10), made(stages, max_tokens=10)
    thinking.resume(Progress((5, 5, 5), 3.0, 1.0), 100.0)
    answer.resume(Progress((5, 9, 5), 3.0, 1.0), 100.0)
    assert (thinking.stage, answer.stage) == (THINKING, ANSWER)
    assert thinking.deadline == pytest.approx(97.0 + 3 * 0.5)
    assert answer.deadline == pytest.approx(
        97.0 + 0.5 + 2 * 0.1
    )  # one token of thinking after the first, two of the answer


@pytest.mark.parametrize(("output", "place"), [((5, 7), 2), ((7, 5), 1), ((5, 5, 5), 3)])
def test_a_request_that_has_ended_is_refused(output: tuple[int, ...], place: int) -> None:
    with pytest.raises(
        InvalidValue, match=rf"token {place} of the output so far, {output[place - 1]}, ends the request"
    ):
        made(max_tokens=3).resume(Progress(output), 100.0)
