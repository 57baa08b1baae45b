"""Padded step times: a step costs what its program costs, and vectorized times equal single ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.perf import Load
from jaxserve.sched.feasibility import largest_chunk
from jaxserve.sched.perf.buckets import NONE, Buckets, Padded
from jaxserve.sched.perf.model import Coefficients

TRUTH = Coefficients(8.7e-3, 4.5e-5, 2e-5, 3e-10, 2.4e-7, 1.5e-8, 11.5e-3, 8 / 256)
ENGINE = Buckets((1, 4, 8, 16, 32, 64), (64, 128, 512))
SIZES = st.lists(st.integers(1, 700), max_size=5, unique=True).map(lambda sizes: tuple(sorted(sizes)))
BUCKETS = st.one_of(st.just(NONE), st.just(ENGINE), st.builds(Buckets, SIZES, SIZES))


def padded(buckets: Buckets, seed: int) -> Padded:
    factors = np.random.default_rng(seed).uniform(0.5, 2.0, buckets.programs)
    return Padded(TRUTH, buckets, tuple(factors.tolist()))


@given(BUCKETS, st.integers(0, 600), st.integers(0, 80), st.integers(0, 5000))
def test_padding_adds_tokens_only(buckets: Buckets, prefill: int, decode: int, context: int) -> None:
    load = Load(prefill, decode, float(prefill * prefill), context, context * decode, 7, 0)
    program, whole = buckets.placed(load)
    assert 0 <= program < buckets.programs
    assert whole[2:] == load[2:] and whole.tokens >= load.tokens
    assert (whole.prefill > 0) == (load.prefill > 0) and (prefill == 0 or whole.decode == decode)
    sizes = buckets.mixed if prefill else buckets.decode
    assert whole.tokens == min((size for size in sizes if size >= load.tokens), default=load.tokens)


@given(BUCKETS, st.integers(0, 9), st.lists(st.integers(0, 3000), min_size=1, max_size=6), st.integers(1, 700))
def test_a_prompt_takes_the_sum_of_its_steps(buckets: Buckets, seed: int, tokens: list[int], chunk: int) -> None:
    form, context = padded(buckets, seed), 300
    expected = []
    for left in tokens:
        at, seconds = context, 0.0
        while left:
            size = min(chunk, left)
            seconds += form.step_time(Load().add_chunk(size, at))
            at, left = at + size, left - size
        expected.append(seconds)
    found = form.prefill_times(np.array(tokens, float), np.full(len(tokens), float(context)), chunk)
    assert found == pytest.approx(expected)


@given(BUCKETS, st.integers(0, 9), st.lists(st.integers(1, 100), min_size=1, max_size=6))
def test_vectorized_decode_times_equal_single_steps(buckets: Buckets, seed: int, rows: list[int]) -> None:
    form, count = padded(buckets, seed), np.array(rows, float)
    found = form.decode_times(count, 900.0 + count, 700.0 * count)
    steps = [form.step_time(Load(decode=n, longest=900 + n, context=700 * n)) for n in rows]
    assert found == pytest.approx(steps)


@given(st.integers(0, 60), st.integers(65, 512), st.floats(0.0, 1.0))
def test_a_chunk_fills_its_padding_bucket(rows: int, left: int, share: float) -> None:
    """The largest chunk is searched for on a grid, but the padding of its bucket is free."""
    form = Padded(replace(TRUTH, quadratic=0.0), ENGINE)
    load = Load(decode=rows, longest=500 if rows else 0, context=500 * rows)
    costs = [form.step_time(load.add_chunk(size, 0)) for size in range(1, left + 1)]
    bound = costs[0] + share * (costs[-1] - costs[0])
    most = max(size for size, cost in enumerate(costs, 1) if cost <= bound)
    assert largest_chunk(form.step_time, load, 0, left, bound) == most


def test_invalid_sizes_are_refused() -> None:
    for sizes in ((4, 1), (0, 1), (2, 2)):
        with pytest.raises(InvalidValue, match="must be positive sizes in ascending order"):
            Buckets(decode=sizes)
