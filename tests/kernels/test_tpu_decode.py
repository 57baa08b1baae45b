"""TPU decode in the interpreter against float64, at every edge; its plan, its config and its refusals."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from pallas_kernels.ops.paged_attention.api import AttentionSpec
from pallas_kernels.ops.paged_attention.tpu import config
from pallas_kernels.ops.paged_attention.tpu import kernel as body
from pallas_kernels.ops.paged_attention.tpu.config import Config, TpuShape, decode_config
from pallas_kernels.ops.paged_attention.tpu.plan import plan_decode
from tests.support.kernels.ragged import deal, make
from tests.support.kernels.tpu import POOL, Options, check, races_found, run, step

PAGE = 4
# Around the ends of pages, and of tiles of two pages.
CONTEXTS = [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, 5 * PAGE + 2]
SINGLE = [(1, context) for context in CONTEXTS]
SEVERAL = [(1, 1), (4, 4), (3, PAGE + 1), (2, 2 * PAGE), (4, 2 * PAGE + 2), (1, 17)]
TILE = 2 * PAGE


def test_single_tokens_at_every_edge() -> None:
    """The step includes a longer row and an empty one, which decode does not compute.

    A row alone gives the same bits as beside other rows.
    """
    given = step([*SINGLE[:4], (3, 7), (0, 0), *SINGLE[4:]], 2, 4)
    options = Options(Config(1, TILE, mixed=True))
    out, lse = check(given, options)
    row = len(CONTEXTS) + 1  # the longest row
    lengths = np.where(np.arange(len(given.ragged.lengths)) == row, given.ragged.lengths, 0)
    alone, alone_lse = run(dataclasses.replace(given, ragged=given.ragged._replace(lengths=lengths)), options)
    mine = np.asarray(given.ragged.rows) == row
    np.testing.assert_array_equal(out[mine], alone[mine])
    np.testing.assert_array_equal(lse[mine], alone_lse[mine])
    assert not np.any(alone[~mine])


def test_several_tokens_apart_in_a_window_under_a_cap() -> None:
    check(step(SEVERAL, 2, 5), Options(Config(4, TILE, mixed=False), window=6, softcap=3.0))


def test_int8_pools_times_their_scales() -> None:
    check(step(SINGLE, 2, 2, dtype="bfloat16", stored="int8"), Options(Config(1, TILE, mixed=True)))


def test_a_copy_that_is_not_waited_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the test: without its wait, the kernel reads data that has not arrived."""
    monkeypatch.setattr(body.Pages, "wait", lambda *_: None)
    jax.clear_caches()
    out, _ = run(step(SINGLE, 1, 1), Options(Config(1, TILE, mixed=True)))
    jax.clear_caches()
    assert races_found() or not np.all(np.isfinite(out))


@pytest.mark.full
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("queries", [1, 4, 16])
@pytest.mark.parametrize("group", [1, 4, 5, 8, 16])
def test_groups_and_queries(group: int, queries: int, mixed: bool) -> None:
    rows = [(1, 1), (1, PAGE), (min(2, queries), PAGE + 1), (queries, queries + 5), (queries, queries)]
    check(step(rows, 2, group), Options(Config(queries, TILE, mixed=mixed)))


@pytest.mark.full
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
@pytest.mark.parametrize("page", [4, 8, 16])
@pytest.mark.parametrize("mixed", [True, False])
def test_pages_and_kv_heads(page: int, kv_heads: int, mixed: bool) -> None:
    rows = [(1, page - 1), (1, page), (1, page + 1), (2, 2 * page + 1), (1, 1)]
    check(step(rows, kv_heads, 2, page=page), Options(Config(2, 16, mixed=mixed)))


@pytest.mark.full
@pytest.mark.parametrize("window", [1, 3, 8, 9, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("mixed", [True, False])
def test_windows_and_caps(window: int, softcap: float | None, mixed: bool) -> None:
    check(step(SEVERAL, 2, 2), Options(Config(4, TILE, mixed=mixed), window=window, softcap=softcap))


@pytest.mark.full
@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mixed", [True, False])
def test_quantized_pools(stored: str, dtype: str, mixed: bool) -> None:
    check(step(SEVERAL, 2, 4, dtype=dtype, stored=stored), Options(Config(4, TILE, mixed=mixed), softcap=5.0))


@pytest.mark.full
@pytest.mark.parametrize("mixed", [True, False])
def test_shared_pages(mixed: bool) -> None:
    rows = [(1, 10), (2, 11), (1, 6)]
    check(step(rows, 2, 2, tables=[[3, 7, 5], [3, 7, 9], [3, 8]]), Options(Config(2, TILE, mixed=mixed)))


@pytest.mark.full
def test_a_step_without_rows() -> None:
    given = step([(0, 0)], 2, 2, tables=[[]])
    out, lse = run(given, Options(Config(1, TILE, mixed=True)))
    assert not np.any(out) and np.all(lse < -1e29)


def test_the_plan_places_every_token_of_its_rows_once() -> None:
    rows = [(3, 9), (1, 1), (0, 0), (5, 5), (2, 12)]
    ragged = make(rows, deal(rows, page=4, pool=POOL), page=4, pool=POOL, tokens=14, padded_rows=7)
    work = jax.tree.map(np.asarray, jax.jit(partial(plan_decode, queries=3))(ragged))
    count = int(work.items[0])
    assert count == 3 and list(work.rows[:count]) == [0, 1, 4]
    assert list(work.firsts[:count]) == [6, 0, 10] and list(work.ends[:count]) == [9, 1, 12]
    assert list(work.slots) == [0, 1, 2, 3, *[21] * 5, 6, 7, *[21] * 3], (
        "the row of 5 is left to prefill, 3 are padding"
    )


def test_a_config_that_does_not_fit_says_so() -> None:
    shape = TpuShape(32, 8, 128, 64)
    assert decode_config(shape).mixed and not decode_config(shape, 16).mixed
    decode_config(shape, 16).validate(shape)
    with pytest.raises(ValueError, match=r"needs \d+ bytes of VMEM"):
        Config(512, 4096).validate(shape)
    with pytest.raises(ValueError, match=r"self\.queries=0 and self\.keys=256 must be at least 1"):
        Config(0).validate(shape)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"head_dim": 256}, None),
        ({"kv_heads": 2, "heads": 8}, None),
        ({"platform": "gpu"}, "it needs a TPU; this is gpu"),
        ({"platform": "cpu", "interpret": True}, None),
        ({"dtype": "float16"}, "float16 activations"),
        ({"kv_heads": 5, "heads": 40}, "a power of two"),
        ({"head_dim": 64}, None),
        ({"head_dim": 64, "kv_dtype": "int8"}, "head dim 64 with 8 kv heads per shard and 8-bit pools; it must be"),
        ({"head_dim": 192}, "head dim 192 with 8 kv heads per shard"),
        ({"head_dim": 256, "kv_heads": 2}, "a multiple of 128 with a multiple of 8 kv heads"),
        ({"kv_heads": 1}, "1 kv heads per shard in 16-bit pools"),
        ({"kv_heads": 2, "kv_dtype": "int8"}, "32-bit words, so at least 4 are needed"),
        ({"kv_heads": 1, "dtype": "float32"}, None),
        ({"page": 8}, "a multiple of 16"),
    ],
)
def test_what_it_supports(change: dict[str, object], reason: str | None) -> None:
    spec = dataclasses.replace(
        AttentionSpec("bfloat16", platform="tpu", heads=32, kv_heads=8, head_dim=128, page=64), **change
    )
    told = config.supports(spec)
    assert told is None if reason is None else told is not None and reason in told
