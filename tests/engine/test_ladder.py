"""The sizes of step programs: few, and close enough that padding costs less than half of a step."""

from __future__ import annotations

import math

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.programs.inputs import LADDER, InputBuilder, Limits
from jaxserve.engine.programs.segments import Segments
from jaxserve.engine.programs.step import Programs
from jaxserve.sched.api.preemption import SHORT, SHORT_ON_CPU, WHOLE, Boundary
from tests.support.examples import examples
from tests.support.parity.families import model


def limits_of(slots: int, tokens: int) -> Limits:
    return Limits(slots, tokens, pages=100, page_size=16, row_pages=8, vocab=96)


def test_buckets_cover_every_step() -> None:
    for slots, tokens in ((1, 1), (4, 16), (64, 512), (256, 8192), (100, 3000), (64, 8)):
        limits = limits_of(slots, tokens)
        buckets = limits.buckets
        assert len(set(buckets)) == len(buckets)
        assert max(b.rows for b in buckets if b.decode) == slots
        assert max(b.tokens for b in buckets if not b.decode) >= tokens
        assert all(b.width in limits.widths and b.width >= b.rows for b in buckets)


@settings(max_examples=examples(60))
@given(st.integers(2, 20_000), st.integers(1, 300), st.data())
def test_prompt_steps_are_padded_by_less_than_half(tokens: int, slots: int, data: st.DataObject) -> None:
    """Larger steps do not run in smaller programs, and a step pays for at most half more than its tokens."""
    builder, most = InputBuilder(limits_of(slots, tokens)), max(tokens, slots)
    steps = sorted(data.draw(st.lists(st.integers(2, most), min_size=1, max_size=8)))
    chosen = [builder.bucket(1, step).tokens for step in steps]
    assert chosen == sorted(chosen) and chosen[-1] <= most
    for step, padded in zip(steps, chosen, strict=True):
        assert step <= padded <= max(LADDER[0], math.ceil(1.5 * step))
    doublings = max(0.0, math.log2(most / LADDER[0]))
    assert sum(not bucket.decode for bucket in builder.limits.buckets) <= 2 * math.ceil(doublings) + 1


@pytest.mark.parametrize(
    ("slots", "tokens", "decodes", "prompts", "segmented"),
    [(64, 512, 6, 7, 1), (256, 2048, 8, 11, 8), (256, 8192, 8, 15, 12)],
)
def test_the_number_of_programs(slots: int, tokens: int, decodes: int, prompts: int, segmented: int) -> None:
    """As stated in docs/reference/architecture.md."""
    limits, spec, mesh = limits_of(slots, tokens), model("Qwen2").spec, jax.make_mesh((1,), ("tp",))
    short = SHORT_ON_CPU if tokens == 512 else SHORT
    programs, segments = Programs(spec, mesh, limits), Segments(spec, mesh, limits, Boundary(1), short=short)
    assert [sum(one.decode for one in programs.step), len(programs.step)] == [decodes, decodes + prompts]
    assert len(segments.begin) == len(segments.end) == segmented
    assert len(programs.block) <= decodes + prompts  # one for each number of tokens


def test_the_simulator_knows_which_steps_are_segmented() -> None:
    assert max(size for size in LADDER if size < SHORT) == WHOLE
