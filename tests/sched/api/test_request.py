"""The record of one request: its end, its next deadline, and its state after its pool was lost."""

from __future__ import annotations

import pytest

from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import SLO

EOS = 2


def request(**params: object) -> Request:
    made = SamplingParams(**{"max_tokens": 8, **params})  # type: ignore[arg-type]
    return Request(0, range(10), made, SLO(ttft=1.0, tpot=0.1), 5.0, eos=frozenset([EOS]))


def reasons(one: Request, token: int, count: int) -> list[str | None]:
    one.pending = count
    return [one.gain(token, 6.0 + at) for at in range(count)]


@pytest.mark.parametrize("least", [0, 1, 2, 5])
def test_a_stop_token_counts_from_min_tokens_on(least: int) -> None:
    """`min_tokens` includes the stop token: the output has at least `count` tokens."""
    continues = max(0, least - 1)
    assert reasons(request(min_tokens=least), EOS, continues + 1) == [None] * continues + ["stop"]


def test_max_tokens_ends_an_output() -> None:
    assert reasons(request(), 7, 8) == [None] * 7 + ["length"]
    assert reasons(request(ignore_eos=True), EOS, 8) == [None] * 7 + ["length"]


def test_deadlines_stay_the_same_when_a_pool_is_lost() -> None:
    """Tokens that were sampled on the device and lost are sampled again, and are not due any later."""
    one = request()
    one.pending = 1
    one.gain(7, 6.0)
    one.budget += one.tpot  # as planning does for each sampled token
    due = one.deadline
    one.pending += 2
    one.budget += 2 * one.tpot
    assert one.deadline == pytest.approx(due + 0.2)
    one.forget_cache()
    assert (one.deadline, one.pending, one.computed, one.slot, one.pages) == (pytest.approx(due), 0, 0, None, [])
    one.forget_cache()
    assert one.deadline == pytest.approx(due)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, 3, (0, 1, 2)), (8, 12, (8, 9, 7, 8)), (9, 11, (9, 7)), (10, 13, (7, 8, 9)), (12, 13, (9,)), (10, 10, ())],
)
def test_tokens_continue_from_prompt_to_output(start: int, end: int, expected: tuple[int, ...]) -> None:
    one = request()
    one.output = [7, 8, 9]
    assert one.tokens(start, end) == expected == tuple(map(one.token, range(start, end)))
