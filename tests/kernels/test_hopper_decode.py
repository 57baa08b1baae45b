"""Decode attention for Hopper in the interpreter, against float64, with race detection if available."""

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

from pallas_kernels.layout import Ragged, Scales
from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.countdown import is_last
from pallas_kernels.mosaic.interpret import interpreter
from pallas_kernels.mosaic.spec import SMEM, AttentionShape
from pallas_kernels.ops.paged_attention.hopper import decode, decode_merge
from pallas_kernels.ops.paged_attention.hopper.decode import Config, candidates, heuristic, paged_decode
from tests.support.examples import examples
from tests.support.kernels.checks.decode import EDGES, SCALE, SMALL, Mixed, Problem, check
from tests.support.kernels.interpreted import haste, needs_interpreter, on_gpu

BODIES = [False, pytest.param(True, marks=needs_interpreter)]
SIZES = [0.0, 1e-35, 1e-20, 1e3]  # of the scales of keys, relative to those that fit the values


@pytest.mark.slow
def test_a_row_split_among_workers() -> None:
    check(Problem(((1, 70),)), SMALL)


@needs_interpreter
@pytest.mark.parametrize("warps", [False, True])
def test_queries_of_rows_around_pages_and_tiles(warps: bool) -> None:
    check(Problem(EDGES, heads=4, padded=1), replace(SMALL, warps=warps, consumers=1))


@needs_interpreter
@pytest.mark.parametrize("warps", [False, True])
def test_a_query_that_sees_nothing_of_a_tile(warps: bool) -> None:
    """The last tile begins after the first token and has its own consumer; it must get no weight there.

    The scale is chosen so that rounding matters: MASKED times this scale rounds down.
    """
    check(
        Problem(((12, 75), (1, 6)), heads=4, scale=0.125), replace(SMALL, warps=warps, queries=16, tile=64, consumers=2)
    )


@needs_interpreter
@pytest.mark.parametrize("warps", [False, True])
@pytest.mark.parametrize("k_factor", SIZES)
def test_key_scales_of_any_size(k_factor: float, warps: bool) -> None:
    """The first token sees nothing of the second tile, nor do most of its warps of a context of 6 keys."""
    rows = ((3, 66), (1, 6), (1, 1))
    problem = Problem(rows, heads=4, stored=jnp.float8_e4m3fn, k_factor=k_factor)
    check(problem, replace(SMALL, warps=warps, queries=4, tile=64, consumers=2))


FEW, LONG = ((1, 20), (1, 130)), ((1, 200), (1, 300), (1, 3))
F16, B16, F8, I8 = jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8
FORMS = [  # of both bodies
    *(
        (
            Problem(((1, page - 1), (1, page), (1, min(page + 1, 200)), (1, 130)), heads=4, kv_heads=2, page=page),
            replace(SMALL, stages=4),
        )
        for page in (16, 128, 256)
    ),
    *(
        (Problem(FEW, heads=2 * group, kv_heads=2, dim=dim), SMALL)
        for group, dim in ((1, 64), (4, 128), (5, 64), (8, 128), (16, 256))
    ),
    *(  # several tokens, causal among them; the last row is left to prefill
        (Problem(((some, 66), (some, some), (1, 40), (some + 1, 40)), heads=4), replace(SMALL, queries=some))
        for some in (2, 3, 8)
    ),
    *(
        (Problem(FEW, heads=4, kv_heads=2, dtype=dtype, stored=stored), SMALL)
        for dtype, stored in ((F16, None), (B16, F8), (B16, I8), (F16, F8))
    ),
    *(
        (
            Problem(((1, 200), (3, 70), (2, 2)), heads=4, dim=dim, window=window, softcap=softcap),
            replace(SMALL, queries=3),
        )
        for window, softcap, dim in ((1, None, 64), (30, 5.0, 64), (None, 1.0, 64), (30, None, 256))
    ),
    (Problem(((1, 70), (1, 90), (1, 128)), tables=((5, 9), (5, 3), (5, 9))), SMALL),
    (Problem(LONG, page=32), Config(workers=1, stages=1, consumers=1, tile=64)),
    (Problem(LONG, page=32), Config(workers=3, stages=3, consumers=1, tile=64)),
    (Problem(LONG), Config(workers=1, stages=4, consumers=2, tile=128)),
]
OTHERS = [  # of one body
    *(  # more query rows than one block takes
        (Problem(((some, 80), (1, 5)), heads=group), replace(SMALL, queries=some))
        for some, group in ((16, 4), (16, 5), (9, 8), (2, 64))
    ),
    (Problem(FEW), replace(SMALL, p_in_smem=False)),
    *(  # warps with keys of their own
        pytest.param(
            Problem(
                ((some, 200), (1, 70), (some, some), (1, 130)), heads=8, kv_heads=2, dim=dim, window=window,
                softcap=softcap, stored=stored,
            ),
            replace(SMALL, warps=True, queries=some, tile=tile),
            marks=needs_interpreter,
        )
        for some, dim, tile, window, softcap, stored in (
            (1, 128, 128, None, None, I8), (4, 64, 128, 30, None, F8), (2, 256, 64, None, 5.0, I8),
            (4, 128, 64, 100, None, F8),
        )
    ),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("warps", BODIES)
@pytest.mark.parametrize(("problem", "config"), FORMS, ids=str)
def test_both_bodies(problem: Problem, config: Config, warps: bool) -> None:
    check(problem, replace(config, warps=warps))


@pytest.mark.full
@pytest.mark.parametrize(("problem", "config"), OTHERS, ids=str)
def test_one_body(problem: Problem, config: Config) -> None:
    check(problem, config)


@pytest.mark.full
@needs_interpreter
@pytest.mark.parametrize("warps", [False, True])
def test_rows_of_any_lengths_beside_pages_of_nan(warps: bool) -> None:
    mixed = Mixed(replace(SMALL, warps=warps, queries=3, workers=3))
    rows = st.tuples(st.integers(1, 3), st.integers(0, Mixed.MOST - 3))

    @given(st.lists(rows, min_size=1, max_size=Mixed.ROWS))
    @settings(max_examples=examples(10), deadline=None)
    def check_rows(rows: list[tuple[int, int]]) -> None:
        mixed.check([(length, past + length) for length, past in rows])

    check_rows()


@needs_interpreter
def test_a_barrier_left_out_of_the_kernel_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the test: consumers that do not signal that a slot was read race with the producer."""
    monkeypatch.setattr("pallas_kernels.ops.paged_attention.hopper.decode_block.fence", lambda interpret: None)
    monkeypatch.setattr(decode.compat.plgpu, "commit_smem", lambda: None)
    problem = Problem(((1, 200),))
    with pytest.raises(AssertionError, match="races"):
        check(problem, replace(SMALL, warps=True, workers=1, consumers=1, stages=1))


def test_configs_that_cannot_be_are_named() -> None:
    spec = AttentionShape(rows=8, heads=32, kv_heads=8, dim=128, page=64)
    for config, why in (
        (replace(SMALL, tile=96), "tile=96"),
        (replace(SMALL, stages=3), "stages=3"),
        (replace(SMALL, queries=17), "queries=17"),
        (replace(SMALL, stages=16), "bytes of shared memory"),
        (replace(SMALL, stages=3, consumers=3), "consumers=3"),
    ):
        with pytest.raises(ValueError, match=why):
            config.validate(spec)
    for wrong, why in (
        (replace(spec, dim=80), "dim=80"),
        (replace(spec, page=12), "page=12"),
        (replace(spec, heads=33), "heads=33"),
    ):
        with pytest.raises(ValueError, match=why):
            SMALL.validate(wrong)
    with pytest.raises(ValueError, match="needs at most 16 rows"):
        replace(SMALL, warps=True, queries=5).validate(replace(spec, queries=5, kv_dtype=jnp.int8))
    if not compat.HAS_MMA:
        with pytest.raises(ValueError, match=r"needs jax 0\.11"):
            replace(SMALL, warps=True).validate(spec)


@pytest.mark.parametrize("queries", [1, 4, 16])
@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (8, 2, 128), (16, 1, 256), (12, 12, 64)])
def test_the_heuristic_and_all_candidates_are_valid(
    heads: int, kv_heads: int, dim: int, page: int, queries: int
) -> None:
    for stored in (jnp.bfloat16, jnp.float8_e4m3fn):
        spec = AttentionShape(64, heads, kv_heads, dim, page, queries, jnp.bfloat16, stored)
        best = heuristic(spec)
        best.validate(spec)
        assert best.smem_bytes(spec) <= SMEM
        found = list(candidates(spec))
        assert found[0] == best and len(set(found)) == len(found) > 1
        for config in found:
            config.validate(spec)


def test_arguments_that_do_not_fit_are_named() -> None:
    problem = Problem(((1, 3),))
    ragged, (q, k, v, _) = problem.ragged(), problem.arrays()
    work = SMALL.plan(ragged, page=problem.page)
    with pytest.raises(ValueError, match="8-bit pools need scales"):
        paged_decode(q, k, v, ragged, work, scale=1.0, scales=Scales(jnp.ones(1), jnp.ones(1)), config=SMALL)
    with pytest.raises(ValueError, match="plan with this config"):
        paged_decode(q, k, v, ragged, work, scale=1.0, config=replace(SMALL, workers=3))


SPLIT_ROWS = Problem(((1, 300), (1, 3), (1, 200)), heads=4, padded=2)
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
    check(SPLIT_ROWS, replace(SPLIT, merge=merge))


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

    ragged, (q, k, v, _) = SPLIT_ROWS.ragged(), SPLIT_ROWS.arrays()

    def outcome() -> list[np.ndarray]:
        @partial(jax.jit, compiler_options=haste())
        def step(q: jax.Array, k: jax.Array, v: jax.Array, ragged: Ragged) -> tuple[jax.Array, jax.Array]:
            work = SPLIT.plan(ragged, page=SPLIT_ROWS.page)
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
        check(SPLIT_ROWS, SPLIT)
