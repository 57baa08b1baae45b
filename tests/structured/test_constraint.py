"""A constraint follows an output: masks, thinking, the ends of a text, drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from jaxserve.sched.api.structured_outputs import StructuredOutputs
from jaxserve.sched.api.thinking import ThinkingMarkers
from jaxserve.structured import constraint as under_test
from jaxserve.structured.compiler import Compiler
from jaxserve.structured.constraint import Constraint
from jaxserve.structured.token_filter import words
from tests.support.structured.bytes import END, allowed, bits, tokenizer_json

COMPILER = Compiler(tokenizer_json, 256, [END])
OPEN, CLOSE, TURN, MESSAGE = 1, 2, 3, 4
MARKERS = ThinkingMarkers(((OPEN,), (TURN,)), ((CLOSE,),), ((OPEN,),))
AB = StructuredOutputs(regex="ab{2,4}")


def made(
    wanted: StructuredOutputs = AB, prompt: Sequence[int] = (9,), output: Sequence[int] = (), **more: object
) -> Constraint:
    return Constraint(lambda: COMPILER.matcher(wanted), prompt=prompt, output=output, **more)  # type: ignore[arg-type]


def test_masks_follow_the_output() -> None:
    one = made()
    seen = [allowed(one)]
    for token in b"abb":
        one.tell((token,))
        seen.append(allowed(one))
    assert seen == [{97}, {98}, {98}, {98, END}]
    one.tell((END,))
    assert allowed(one) == {END} and one.error is None


def test_the_end_is_banned_at_first_unless_nothing_else_is_allowed() -> None:
    early = made(output=b"abb", ends=(END,), least=4)
    assert allowed(early) == {98}
    assert allowed(made(output=b"abbbb", ends=(END,), least=9)) == {END}


def test_a_token_that_is_not_allowed_is_an_error_and_frees_the_rest() -> None:
    one = made(output=b"ax")
    assert allowed(one) == set(range(256))
    assert one.error is not None and "constrained" in one.error


def test_a_constraint_that_cannot_be_compiled_is_an_error() -> None:
    one = made(StructuredOutputs(regex="a("))
    assert len(allowed(one)) == 256
    assert one.error is not None and "unclosed group" in one.error


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ((TURN, OPEN), (), None),
        ((TURN, OPEN), (50, 51), None),
        ((TURN, OPEN), (50, CLOSE), {97}),
        ((TURN, OPEN, CLOSE), (), {97}),
        ((TURN,), (), {97, OPEN}),
        ((TURN,), (OPEN, 50), None),
        ((TURN,), (OPEN, 50, CLOSE), {97}),
        ((TURN,), (97,), {98}),
        ((9,), (), {97}),
    ],
    ids=str,
)
def test_thinking_is_free(prompt: Sequence[int], output: Sequence[int], expected: set[int] | None) -> None:
    """Each case has the tokens allowed after an output; None: all."""
    found = allowed(made(prompt=prompt, output=output, markers=MARKERS))
    assert found == (set(range(256)) if expected is None else expected)


def test_the_header_of_an_answer_is_free() -> None:
    """As of gpt-oss: the answer begins after `<|channel|>final`, further words, and `<|message|>`."""
    harmony = ThinkingMarkers(((OPEN, 20), (TURN,)), ((OPEN, 21),), ((OPEN, 20),), MESSAGE)
    one = made(prompt=(TURN,), output=(OPEN, 20, MESSAGE, 50, TURN, OPEN, 21), markers=harmony)
    assert len(allowed(one)) == 256
    one.tell((60, MESSAGE))
    assert allowed(one) == {97}


def test_a_grammar_holds_at_once_where_the_prompt_asks_for_no_thinking() -> None:
    """As of Granite 3.2, whose thinking begins with words that an answer may have too."""
    asked = replace(MARKERS, asks=((7, 8),))
    assert allowed(made(prompt=(7, 8, TURN), markers=asked)) == {97, OPEN}
    assert allowed(made(prompt=(7, TURN, 8, TURN), markers=asked)) == {97}


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_masks_ahead_are_those_of_one_token_at_a_time(seed: int, depth: int) -> None:
    """For drafts that are right up to some place, and not changed by looking ahead."""
    draw = random.Random(seed)
    wanted = StructuredOutputs(json={"type": "array", "items": {"type": "integer"}, "maxItems": 3})
    one, output = made(wanted), list[int]()
    for _ in range(draw.randrange(4)):
        output.append(draw.choice(sorted(allowed(one))))
        one.tell(output[-1:])
    step, draft, masks = made(wanted, output=output), list[int](), list[set[int]]()
    for at in range(depth + 1):
        masks.append(allowed(step))
        draft.append(draw.choice(sorted(masks[-1])) if draw.random() < 0.8 else 0)
        step.tell(draft[-1:])
        if draft[-1] not in masks[-1]:
            draft += [0] * (depth - at - 1)
            break
    found = np.zeros((depth + 1, words(256)), np.int32)
    one.fill_ahead(found, draft[:depth])
    assert [bits(row) for row in found][: len(masks)] == masks[: depth + 1]
    assert allowed(one) == masks[0] and one.error is None


class Timed:
    """A matcher whose masks take as much CPU time as a test says."""

    def __init__(self, inner: LLMatcher, clock: Clock) -> None:
        self._inner = inner
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def deep_copy(self) -> Timed:
        return Timed(self._inner.deep_copy(), self._clock)

    def unsafe_compute_mask_ptr(self, *given: int) -> None:
        self._clock.now += self._clock.takes
        self._inner.unsafe_compute_mask_ptr(*given)


@dataclass
class Clock:
    """The CPU time of a thread."""

    takes: float  # seconds of a mask
    now: float = 0.0

    def constraint(self) -> Constraint:
        wanted = StructuredOutputs(regex="a{200}")
        return Constraint(lambda: Timed(COMPILER.matcher(wanted), self), prompt=(9,), output=())  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("drafts", [0, 3])
def test_slow_masks_end_the_request_that_needs_them(monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    """Its CPU time counts, on average: neither one slow mask nor a busy machine ends a request."""
    clock = Clock(0.07 / (1 + drafts))  # once
    monkeypatch.setattr(under_test, "thread_time", lambda: clock.now)
    slow = clock.constraint()
    masks = np.zeros((1 + drafts, words(256)), np.int32)
    for _ in range(40):
        slow.fill_ahead(masks, b"a" * drafts) if drafts else slow.fill(masks[0])
        assert slow.error is None and bits(masks[-1]) == {97}
        slow.tell(b"a" * (1 + drafts))
        clock.takes = 0.004
    clock.takes, made_since = 0.012, 0
    while slow.error is None:
        slow.fill_ahead(masks, b"a" * drafts) if drafts else slow.fill(masks[0])
        slow.tell((97,))
        made_since += 1 + drafts
    assert "ms for each token" in slow.error and made_since <= under_test.REMEMBERED


def test_masks_are_made_between_steps_while_they_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(1e-4)
    monkeypatch.setattr(under_test, "thread_time", lambda: clock.now)
    one = clock.constraint()
    late = []
    for takes in (1e-4, 0.003, 1e-4):
        clock.takes = takes
        for _ in range(50):
            allowed(one)
            one.tell((97,))
            late.append(one.late)
    assert not any(late[:50]) and all(late[60:100]) and not any(late[140:])


def test_a_mask_that_was_made_ahead_is_used_once() -> None:
    one, same = made(StructuredOutputs(regex="abc")), made(StructuredOutputs(regex="abc"))
    for token in b"abc":
        one.prepare(words(256))
        assert one.prepared and allowed(one) == allowed(same) == {token}
        one.tell((token,))
        same.tell((token,))
        assert not one.prepared
    assert allowed(one) == allowed(same) == {END}
