"""Which tokens `allowed_token_ids` and `bad_words` leave, alone and with a text to match."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.generation.bad_words import with_bad_words
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.structured_outputs import StructuredOutputs
from jaxserve.structured.compiler import Compiler
from jaxserve.structured.constraint import Constraint
from jaxserve.structured.token_filter import TokenFilter, words
from tests.support.structured.bytes import END, allowed, bits, tokenizer_json

COMPILER = Compiler(tokenizer_json, 256, [END])
SEQUENCES = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=6).map(tuple)
EVERY = set(range(256))


def made(output: Any = (), wanted: StructuredOutputs | None = None, least: int = 0, **fields: Any) -> Constraint:
    params = SamplingParams(**fields)
    make = None if wanted is None else lambda: COMPILER.matcher(wanted)
    return Constraint(make, prompt=(9,), output=output, ends=(END,), least=least, tokens=TokenFilter.of(params, 256))


def expected(output: list[int], banned: Any) -> set[int]:
    """Return the tokens that complete none of the banned sequences."""
    return {token for token in EVERY if not any((*output, token)[-len(one) :] == one for one in banned)}


def test_a_request_without_filter_has_none() -> None:
    assert TokenFilter.of(SamplingParams(), 256) is None
    assert not SamplingParams().constrained
    assert SamplingParams(allowed_token_ids=[1]).constrained  # type: ignore[arg-type]


def test_allowed_tokens_include_the_end_only_if_given() -> None:
    assert allowed(made(allowed_token_ids=[5, 31, 32, 255])) == {5, 31, 32, 255}
    assert allowed(made(allowed_token_ids=[5, END])) == {5, END}


@given(SEQUENCES, st.lists(st.integers(0, 4), max_size=8))
def test_the_last_token_of_a_sequence_is_banned_after_the_others(banned: Any, output: list[int]) -> None:
    whole = made(output, bad_words_token_ids=banned)
    assert allowed(whole) == expected(output, banned)
    step = made(bad_words_token_ids=banned)
    for token in output:
        step.tell((token,))
    assert allowed(step) == allowed(whole)


@given(SEQUENCES, st.integers(0, 2**32 - 1))
def test_masks_ahead_are_those_of_one_token_at_a_time(banned: Any, seed: int) -> None:
    draw = random.Random(seed)
    output = [draw.randrange(5) for _ in range(draw.randrange(4))]
    draft = [draw.randrange(5) for _ in range(4)]
    found = np.zeros((5, words(256)), np.int32)
    one = made(output, bad_words_token_ids=banned)
    one.fill_ahead(found, draft)
    for at in range(5):
        right = expected([*output, *draft[:at]], banned)
        assert bits(found[at]) == right
        if at == 4 or draft[at] not in right:
            break
    assert allowed(one) == expected(output, banned) and one.error is None


def test_both_a_text_and_tokens() -> None:
    wanted = StructuredOutputs(regex="[abc]{2,4}")
    one = made(b"a", wanted, bad_words_token_ids=[(97, 98)])
    assert allowed(one) == {97, 99}
    assert allowed(made(b"ab", wanted, allowed_token_ids=[99, END])) == {99, END}
    assert allowed(made(b"ab", wanted, least=3, allowed_token_ids=[99, END])) == {99}
    assert allowed(made(b"ab", wanted, least=3, allowed_token_ids=[END])) == {END}


def test_the_end_waits_for_min_tokens() -> None:
    assert allowed(made(allowed_token_ids=[5, END], least=2)) == {5}
    assert allowed(made((5, 5), allowed_token_ids=[5, END], least=2)) == {5, END}


def test_no_token_left_is_an_error() -> None:
    one = made(wanted=StructuredOutputs(regex="ab"), allowed_token_ids=[98])
    assert allowed(one) == EVERY
    assert one.error is not None and "allowed_token_ids" in one.error


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("allowed_token_ids", {"allowed_token_ids": []}),
        ("allowed_token_ids", {"allowed_token_ids": ["a"]}),
        ("bad_words", {"bad_words": [" "]}),
        ("bad_words", {"bad_words": ["x" * 257]}),
        ("bad_words", {"bad_words": ["x"] * 1025}),
        ("bad_words_token_ids", {"bad_words_token_ids": [[]]}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
    ],
    ids=str,
)
def test_refusals_name_the_field(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as error:
        SamplingParams(**given)
    assert error.value.param == field and field in str(error.value)


class Letters:
    """A tokenizer of which a space and the letter after it are one token."""

    def encode(self, text: str, special: bool) -> list[int]:
        spaced = [ord(text[1]) + 1000] if text.startswith(" ") else []
        return spaced + [ord(letter) for letter in text[2 * len(spaced) :]]


def test_words_are_banned_with_a_space_before() -> None:
    letters: Any = Letters()
    params = with_bad_words(SamplingParams(bad_words=["ab", " c"]), letters)  # type: ignore[arg-type]
    assert params.bad_words_token_ids == ((97, 98), (1097, 98), (99,), (1099,))
    assert with_bad_words(params, letters) is params
    assert params.room(50) is None
    assert SamplingParams(truncate_prompt_tokens=-1, max_tokens=16).room(50) == 34
    assert SamplingParams(truncate_prompt_tokens=7).room(50) == 7
