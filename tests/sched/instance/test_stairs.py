"""Laws of fitting prompt chunks to the sizes that steps are padded to."""

from __future__ import annotations

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.api.perf import Load
from jaxserve.sched.instance.stairs import LONGER, SAVED, Chunk, fitted
from jaxserve.sched.perf.buckets import Buckets, Padded
from jaxserve.sched.perf.model import Coefficients

STAIRS = (64, 96, 128, 192, 256, 384, 512)
COEFFICIENTS = Coefficients(fixed=1e-3, prefill=1e-4, decode=1e-4, quadratic=1e-10, longest=0.0, context=0.0)
seconds = Padded(COEFFICIENTS, Buckets((1, 8, 64), STAIRS)).step_time


@st.composite
def chunks_of(draw: st.DrawFn) -> list[Chunk]:
    lengths = draw(st.lists(st.integers(1, 200), min_size=1, max_size=4))
    return [Chunk(draw(st.integers(0, 9000)), one, one + draw(st.integers(0, 300))) for one in lengths]


@given(st.integers(0, 64), chunks_of(), st.sampled_from((300, 384, 512)))
def test_fitting_pays(decodes: int, chunks: list[Chunk], most: int) -> None:
    """No chunk leaves its prompt, all but the last one only grow, and neither the size nor the time grows."""
    rows = Load(decode=decodes, longest=10, context=10 * decodes)
    lengths = fitted(rows, chunks, STAIRS, most, seconds)
    assert all(0 < length <= chunk.left for length, chunk in zip(lengths, chunks, strict=True))
    assert all(length >= chunk.length for length, chunk in zip(lengths[:-1], chunks[:-1], strict=True))
    before, after = rows, rows
    for chunk, length in zip(chunks, lengths, strict=True):
        before, after = before.add_chunk(chunk.length, chunk.start), after.add_chunk(length, chunk.start)
    if after.tokens > before.tokens:
        assert after.tokens <= most
    assert bisect_left(STAIRS, after.tokens) <= bisect_left(STAIRS, before.tokens)
    assert seconds(after) <= LONGER * seconds(before)
    if after.tokens < before.tokens:
        rest = rows.add_chunk(before.tokens - after.tokens, chunks[-1].start + lengths[-1])
        assert seconds(after) + seconds(rest) < SAVED * LONGER * seconds(before)
        assert after.tokens in STAIRS


def test_a_cut_prompt_fills_the_size_of_its_step() -> None:
    rows = Load(decode=4, longest=10, context=40)
    assert fitted(rows, [Chunk(0, 100, 400)], STAIRS, 512, seconds) == [124]
    assert fitted(rows, [Chunk(0, 100, 110), Chunk(0, 10, 400)], STAIRS, 512, seconds) == [110, 14]


def test_a_step_just_above_a_size_is_cut_back_to_it() -> None:
    assert fitted(Load(), [Chunk(0, 390, 390)], STAIRS, 512, seconds) == [384]
    assert fitted(Load(), [Chunk(0, 500, 500)], STAIRS, 512, seconds) == [500], "two steps would take longer"
    assert fitted(Load(), [Chunk(0, 388, 388), Chunk(0, 2, 2)], STAIRS, 512, seconds) == [388, 2], "nothing to cut"


def test_without_sizes_nothing_changes() -> None:
    assert fitted(Load(), [Chunk(0, 390, 900)], (), 512, seconds) == [390]
    assert fitted(Load(), [Chunk(0, 600, 900)], STAIRS, 1024, seconds) == [600], "a load above the largest size"
