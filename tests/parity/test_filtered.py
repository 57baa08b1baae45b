"""No schedule changes the tokens of requests with `allowed_token_ids` and `bad_words`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from jaxserve.sched.api.request import Request
from jaxserve.sched.api.structured_outputs import StructuredOutputs
from tests.support.parity.asks import ROOMY, TIGHT, asks, guessing, setup
from tests.support.parity.law import Ask, assert_allowed, compare
from tests.support.parity.policies import Longest

LETTERS = tuple(range(97, 105))
PAIRS = tuple((a, b) for a in LETTERS for b in LETTERS if a < b)
FILTERS = (
    {"allowed_token_ids": LETTERS},
    {},
    {"allowed_token_ids": LETTERS, "bad_words_token_ids": PAIRS},
    {"bad_words_token_ids": ((97,), *PAIRS), "structured_outputs": StructuredOutputs(regex="[a-h]{6,30}")},
)


@cache
def filtered() -> tuple[Ask, ...]:
    """Return requests of all kinds of sampling, three of four with a filter."""
    found = []
    for index, ask in enumerate(asks(3)):
        fields = FILTERS[index % len(FILTERS)]
        found.append(replace(ask, params=replace(ask.params, **fields, max_tokens=30)))  # type: ignore[arg-type]
    return tuple(found)


@cache
def alone() -> tuple[Request, ...]:
    return setup("1x1", 64, ROOMY).each(filtered())


def check(served: Sequence[Request]) -> None:
    """Assert the law, and that every token is allowed."""
    assert [request.error for request in served] == [None] * len(served)
    assert compare(filtered(), served, alone()) <= 1
    for ask, request in zip(filtered(), served, strict=True):
        if ask.params.constrained:
            assert_allowed(ask, request.output)


@pytest.mark.parametrize("case", [("1x1", 64, TIGHT, "unified"), ("2x1", 16, ROOMY, "kairos")], ids=str)
def test_no_schedule_changes_filtered_outputs(case: tuple[str, int, int, str]) -> None:
    mesh, chunk, pages, policy = case
    check(setup(mesh, chunk, pages).run(filtered(), policy)[0])


def test_drafts_are_filtered() -> None:
    served, cluster = guessing().run(filtered(), Longest)
    assert cluster.cores[0].scheduler.counters.drafted > 0
    check(served)
