"""Isolation of rows: NaN and infinity in pages or rows of other requests never change a row's bits.

Tables are as the engine makes them (inputs.SlotTable): entries after a row's own pages repeat its
last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layout import Ragged
from pallas_kernels.ops.mla import hopper as latent
from pallas_kernels.ops.paged_attention import xla as attention_xla
from pallas_kernels.ops.paged_attention.hopper.decode import Config as DecodeConfig
from pallas_kernels.ops.paged_attention.hopper.prefill import Config as PrefillConfig
from pallas_kernels.ops.paged_attention.tpu.config import Config as TpuConfig
from tests.support.examples import cases
from tests.support.kernels import tpu
from tests.support.kernels.checks.foreign import (
    BYTES,
    CHUNKS,
    DECODE,
    DRAFTS,
    LATENT,
    SCALE,
    WARPS,
    check,
    decode,
    mla,
    prefill,
    ragged_of,
)
from tests.support.kernels.interpreted import needs_interpreter


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("rows", [DECODE, CHUNKS])
def test_xla(rows: Sequence[tuple[int, int]], heads_first: bool) -> None:
    def attend(q: Any, k: Any, v: Any, ragged: Ragged) -> jax.Array:
        if heads_first:
            k, v = (jnp.swapaxes(pool, 1, 2) for pool in (k, v))
        return attention_xla.paged_attention(
            q, k, v, ragged, scale=SCALE, decode=rows is DECODE, heads_first=heads_first
        )

    check(jax.jit(attend), rows, 4 if rows is CHUNKS else 8, 8, jnp.float32, tails=True)


DECODES: list[tuple[Any, ...]] = [
    (WARPS, None, DECODE),
    (WARPS, jnp.float8_e4m3fn, DECODE),
    (WARPS, jnp.int8, DECODE),
    (DecodeConfig(workers=2, stages=2, tile=64), jnp.float8_e4m3fn, DECODE),
    (DecodeConfig(workers=2, stages=2, tile=64), jnp.int8, DECODE),
    (replace(WARPS, queries=4), None, DRAFTS),
    (replace(WARPS, queries=4), jnp.float8_e4m3fn, DRAFTS),
    (DecodeConfig(workers=2, stages=2, tile=64, queries=4), None, DRAFTS),
]


@pytest.mark.full
def test_hopper_decode() -> None:
    decode(DecodeConfig(workers=2, stages=2, tile=64))


@needs_interpreter
@pytest.mark.parametrize(("config", "stored", "rows"), cases(DECODES[1:2], DECODES, apart=True))
def test_hopper_decode_by_warps_and_of_8_bits(
    config: DecodeConfig, stored: Any, rows: Sequence[tuple[int, int]]
) -> None:
    decode(config, stored, rows)


LATENTS: list[tuple[Any, ...]] = [
    (replace(LATENT, warps=True, tile=32), None, DECODE),
    (LATENT, None, DECODE),
    (replace(LATENT, warps=True), jnp.float8_e4m3fn, DECODE),
    (replace(LATENT, warps=True), jnp.int8, DECODE),
    (replace(LATENT, queries=16), None, DRAFTS),
    (replace(LATENT, warps=True, tile=32, queries=4), None, DRAFTS),
    (replace(LATENT, warps=True, queries=4), jnp.float8_e4m3fn, DRAFTS),
]


@needs_interpreter
@pytest.mark.parametrize(("config", "stored", "rows"), cases(LATENTS[:1], LATENTS, apart=True))
def test_hopper_latent(config: latent.Config, stored: Any, rows: Sequence[tuple[int, int]]) -> None:
    mla(config, stored, rows)


def test_hopper_plans_name_no_page_but_the_rows_own() -> None:
    """Tables are padded to whole tiles; the padding names the row's last page."""
    ragged, tables = ragged_of(DECODE, 16, width=3)
    for plan in (
        partial(DecodeConfig(workers=2, stages=2, tile=64).plan, page=16, window=None),
        partial(PrefillConfig(heads=2, keys=64, blocks=2).plan, page=16),
    ):
        work = jax.jit(plan)(ragged)
        assert work.table.shape == (3, 4)
        for row, pages in enumerate(tables):
            assert set(np.asarray(work.table)[row].tolist()) == set(pages)


@needs_interpreter
@pytest.mark.parametrize("stored", [None, *(pytest.param(one, marks=pytest.mark.full) for one in BYTES)])
def test_hopper_prefill(stored: Any) -> None:
    prefill(stored)


@pytest.mark.parametrize("above", [None, 1])
def test_tpu(above: int | None) -> None:
    options = tpu.Options(TpuConfig(1 if above is None else 8, 16), above, SCALE)

    def attend(q: Any, k: Any, v: Any, ragged: Ragged) -> jax.Array:
        return tpu.run(tpu.Step(q, (k, v), ragged), options)[0]

    check(attend, DECODE if above is None else ((9, 9), (20, 30)), 4 if above else 8, tpu.DIM, jnp.float32, tails=True)
