"""Split rows that the last of their workers merges in the decode kernel: numbers, and the order of the workers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.layout import Ragged
from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.countdown import is_last
from pallas_kernels.mosaic.interpret import interpreter
from pallas_kernels.ops.paged_attention.hopper import decode_merge
from pallas_kernels.ops.paged_attention.hopper.decode import paged_decode
from tests.support.examples import examples
from tests.support.kernels.checks.decode import SCALE, SMALL, Problem, check
from tests.support.kernels.interpreted import haste, needs_interpreter, on_gpu

LONG = Problem(((1, 300), (1, 3), (1, 200)), heads=4, padded=2)
SPLIT = replace(SMALL, warps=True, workers=4)


def test_every_last_count_is_told_and_starts_the_next_round() -> None:
    @given(st.integers(0, 4), st.integers(1, 3))
    @settings(max_examples=examples(5), deadline=None)
    def count(most: int, rounds: int) -> None:
        blocks = rounds * (most + 1)

        def body(told: Any, left: Any) -> None:
            last = is_last(left.at[0], jnp.int32(most), interpret)
            told[jax.lax.axis_index("block")] = last.astype(jnp.int32)

        interpret = None if on_gpu() else interpreter()
        run = partial(compat.in_place, created=(jax.ShapeDtypeStruct((blocks,), jnp.int32),), read=())
        told, left = run(
            body, changed=(jnp.full(1, most, jnp.int32),), grid=[("block", blocks)], name="count", interpret=interpret
        )
        assert int(left[0]) == most and int(jnp.sum(told)) == rounds
        if not on_gpu():  # one block after the other
            assert [int(at) for at in np.flatnonzero(told)] == list(range(most, blocks, most + 1))

    count()


@needs_interpreter
@pytest.mark.parametrize("merge", [True, pytest.param(False, marks=pytest.mark.full)])
def test_rows_split_among_several_workers(merge: bool) -> None:
    check(LONG, replace(SPLIT, merge=merge))


@needs_interpreter
@pytest.mark.full
@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 64), (5, 1, 64), (14, 2, 128), (16, 1, 128)])
@pytest.mark.parametrize(("queries", "stored"), [(1, None), (1, jnp.int8), (2, None), (2, jnp.float8_e4m3fn)])
def test_split_rows_of_every_form(
    queries: int, stored: Any, heads: int, kv_heads: int, dim: int, consumers: int
) -> None:
    if stored is not None and queries * heads // kv_heads > 16:
        pytest.skip("8-bit pools have warp products of 16 rows")
    rows = ((queries, 300), (1, 70), (0, 0), (queries, 129))
    problem = Problem(rows, heads=heads, kv_heads=kv_heads, dim=dim, stored=stored, padded=3, sinks=True)
    check(problem, replace(SPLIT, queries=queries, workers=5, consumers=consumers))


@needs_interpreter
@pytest.mark.full
def test_rows_of_any_contexts_and_any_number_of_workers() -> None:
    @given(st.lists(st.integers(1, 260), min_size=1, max_size=3), st.integers(1, 7), st.sampled_from([None, 100]))
    @settings(max_examples=examples(8), deadline=None)
    def rows(contexts: list[int], workers: int, window: int | None) -> None:
        problem = Problem(tuple((1, context) for context in contexts), heads=4, window=window, padded=1)
        check(problem, replace(SPLIT, workers=workers))

    rows()


@needs_interpreter
@pytest.mark.full
@pytest.mark.skipif(on_gpu(), reason="a device chooses the order of the blocks")
def test_bits_do_not_depend_on_which_worker_is_last(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    ragged, (q, k, v, _) = LONG.ragged(), LONG.arrays()

    def outcome() -> list[np.ndarray]:
        @partial(jax.jit, compiler_options=haste())
        def step(q: jax.Array, k: jax.Array, v: jax.Array, ragged: Ragged) -> tuple[jax.Array, jax.Array]:
            work = SPLIT.plan(ragged, page=LONG.page)
            return paged_decode(q, k, v, ragged, work, scale=SCALE, config=SPLIT, interpret=interpreter())

        return [np.asarray(x) for x in jax.block_until_ready(step(q, k, v, ragged))]

    forward = outcome()
    utils: Any = interpret_pallas_call.interpret_utils
    indices = utils.get_indices

    def backward(sizes: Any, at: Any) -> Any:
        return indices(sizes, int(np.prod(sizes)) - 1 - at)

    monkeypatch.setattr(utils, "get_indices", backward)
    for one, other in zip(forward, outcome(), strict=True):
        np.testing.assert_array_equal(one, other)


@needs_interpreter
@pytest.mark.full
@pytest.mark.skipif(on_gpu(), reason="races are not watched on a device")
def test_a_count_before_the_partial_result_is_stored_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the test: a worker that counts while its copies are under way reads its own part too early."""
    wait = decode_merge.plgpu.wait_smem_to_gmem
    monkeypatch.setattr(decode_merge.plgpu, "wait_smem_to_gmem", lambda n, wait_read_only=True: wait(n, True))
    with pytest.raises(AssertionError, match="races"):
        check(LONG, SPLIT)
