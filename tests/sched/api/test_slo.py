"""Deadlines of tokens, and valid objectives."""

from __future__ import annotations

import pytest

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import ANSWER, SLO, THINKING, deadline
from jaxserve.sched.api.thinking import ThinkingEnd

THINK_END = 9


def test_the_envelope_holds_until_the_first_token_is_out() -> None:
    slo = SLO(ttft=8.0, tpot=0.05)
    assert deadline(slo, 100.0, None, 0.0) == 108.0
    assert deadline(slo, 100.0, None, 3 * 0.05) == pytest.approx(108.15)
    assert deadline(slo, 100.0, 111.0, 0.05) == pytest.approx(111.05)  # late: no deadline in the past


def request(slo: SLO) -> Request:
    return Request(1, [1, 2, 3], SamplingParams(), slo, 0.0, thinking=ThinkingEnd([(THINK_END,)]))


def sampled(one: Request) -> None:
    one.pending += 1
    one.budget += one.slo.tpot_of(one.stage)


def test_each_token_counts_by_its_own_stage() -> None:
    one = request(SLO(ttft=1.0, tpot=0.1, stages=((THINKING, 0.02), (ANSWER, 0.05))))
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
