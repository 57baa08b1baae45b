"""The end of thinking in prompts, and the stage of an output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import ANSWER, SLO
from jaxserve.sched.api.thinking import STRETCH, ThinkingEnd, ThinkingMarkers

tokens = st.lists(st.integers(0, 3), max_size=30)
markers = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=4)

OPEN, CLOSE, TURN = 1, 2, 3  # one token each, as in Qwen3
QWEN = ThinkingMarkers(((OPEN,), (TURN,)), ((CLOSE,),))
START, CHANNEL, ANALYSIS, FINAL = 11, 12, 13, 14  # as in gpt-oss
HARMONY = ThinkingMarkers(((START,), (CHANNEL, ANALYSIS)), ((CHANNEL, FINAL),))


def ended(seen: list[int], closes: list[tuple[int, ...]]) -> bool:
    """Return whether a marker ends at the last of these tokens, by brute force."""
    return any(tuple(seen[-len(one) :]) == one for one in closes)


@given(tokens, markers)
def test_a_marker_is_found_at_its_last_token(output: list[int], closes: list[tuple[int, ...]]) -> None:
    end = ThinkingEnd(closes)
    for place, token in enumerate(output, 1):
        assert end.feed(token) == ended(output[:place], closes)
        again = ThinkingEnd(end.markers, end.seen)  # as restored from a journal
        assert len(end.seen) < max(map(len, closes)) and again.seen == end.seen


@given(tokens, tokens, markers, markers)
def test_the_last_marker_of_a_prompt_decides(
    prompt: list[int], output: list[int], opens: list[tuple[int, ...]], closes: list[tuple[int, ...]]
) -> None:
    end = ThinkingMarkers(tuple(opens), tuple(closes)).after(prompt)
    answers = False
    for place in range(1, len(prompt) + 1):
        here = [one for one in (*opens, *closes) if ended(prompt[:place], [one])]
        if here:
            answers = max(here, key=len) in closes
    assert (end is None) == answers
    if end is not None:
        for place, token in enumerate(output, 1):
            assert end.feed(token) == ended([*prompt, *output[:place]], closes)


@pytest.mark.parametrize("after", [0, 1, STRETCH - 2, STRETCH - 1, STRETCH, 3 * STRETCH + 1])
def test_a_marker_far_from_the_end_of_a_prompt(after: int) -> None:
    assert HARMONY.after([START, 8, CHANNEL, FINAL, *[9] * after]) is None
    assert HARMONY.after([START, 8, CHANNEL, FINAL, 9, START, *[9] * after]) is not None
    assert QWEN.after([7, *[9] * after]) is not None


def test_without_an_end_marker_a_model_does_not_think() -> None:
    assert ThinkingMarkers(((OPEN,),)).after([OPEN]) is None


def made(prompt: list[int], slo: SLO) -> Request:
    return Request(0, NewRequest(prompt, SamplingParams(max_tokens=20), slo), 0.0, thinking=HARMONY.after(prompt))


def test_without_stages_no_marker_is_searched_for() -> None:
    one = made([START], SLO())
    assert one.thinking is None and one.stage == ANSWER
