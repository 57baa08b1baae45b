"""The record of one request: its end, deadlines, and state after a lost pool; valid objectives and boundaries."""

from __future__ import annotations

import pytest

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.preemption import Boundary
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import ANSWER, SLO, THINKING, deadline
from jaxserve.sched.api.thinking import ThinkingEnd

EOS = 2


def request(**params: object) -> Request:
    made = SamplingParams(**{"max_tokens": 8, **params})  # type: ignore[arg-type]
    return Request(0, NewRequest(range(10), made, SLO(ttft=1.0, tpot=0.1)), 5.0, eos=frozenset([EOS]))


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("chunk", (0, False)),
        ("layer", (1, False)),
        ("op", (1, True)),
        ("layers:1", (1, False)),
        ("layers:12", (12, False)),
    ],
)
def test_every_spelling_is_parsed(text: str, expected: tuple[int, bool]) -> None:
    assert Boundary.parse(text) == expected


@pytest.mark.parametrize("text", ["", "layers", "layers:0", "layers:-1", "layers:x", "half", "Layer", "layer:2"])
def test_invalid_boundaries_are_named(text: str) -> None:
    with pytest.raises(InvalidValue, match="must be op, layer, layers:K or chunk"):
        Boundary.parse(text)


THINK_END = 9


def test_the_envelope_holds_until_the_first_token_is_out() -> None:
    slo = SLO(ttft=8.0, tpot=0.05)
    assert deadline(slo, 100.0, None, 0.0) == 108.0
    assert deadline(slo, 100.0, None, 3 * 0.05) == pytest.approx(108.15)
    assert deadline(slo, 100.0, 111.0, 0.05) == pytest.approx(111.05)  # late: no deadline in the past


def staged(slo: SLO) -> Request:
    return Request(1, NewRequest([1, 2, 3], SamplingParams(), slo), 0.0, thinking=ThinkingEnd([(THINK_END,)]))


def sampled(one: Request) -> None:
    one.pending += 1
    one.budget += one.slo.tpot_of(one.stage)


def test_each_token_counts_by_its_own_stage() -> None:
    one = staged(SLO(ttft=1.0, tpot=0.1, stages=((THINKING, 0.02), (ANSWER, 0.05))))
    assert one.stage == THINKING and one.deadline == 1.0
    for step, token in enumerate([5, 5, THINK_END, 5]):
        sampled(one)
        one.gain(token, 1.0 + step)
    # tokens 1 and 2 (thinking), 3 and the next one (answer) after the first at 1.0
    assert one.deadline == pytest.approx(1.0 + 2 * 0.02 + 2 * 0.05)


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(InvalidValue, match="'dreaming' must be one of"):
        SLO(stages=(("dreaming", 0.1),))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1), ("temperature", -0.1), ("top_p", 0.0), ("top_k", -2), ("min_p", 2.0), ("n", 0),
        ("presence_penalty", 3.0), ("repetition_penalty", 0.0), ("repetition_penalty", 1e308),
        ("logprobs", 21), ("min_tokens", 17), ("stop", ("",)),
    ],
)  # fmt: skip
def test_sampling_params_name_field_value_and_what_is_allowed(field: str, value: object) -> None:
    with pytest.raises(InvalidValue, match=f"{field}=.* must be ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
