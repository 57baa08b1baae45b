"""The law of rows: NaN and infinity in any page or row that is not its own never change what a row gets, bit for bit.

Tables are as the engine makes them (inputs.SlotTable): entries beyond a row's own pages name its last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention_xla
from pallas_kernels.hopper.decode import Config as DecodeConfig
from pallas_kernels.hopper.decode import paged_decode
from pallas_kernels.hopper.prefill import Config as PrefillConfig
from pallas_kernels.hopper.prefill import paged_prefill
from pallas_kernels.layout import Ragged
from pallas_kernels.tpu.config import Config as TpuConfig
from tests.support.kernels import tpu
from tests.support.kernels.interpreted import needs_interpreter, without_races
from tests.support.kernels.ragged import deal, make

POOL, SCALE = 24, 0.15
FOREIGN = [np.nan, np.inf, -np.inf]
Attend = Callable[[Any, Any, Any, Ragged], jax.Array]
HASTE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def ragged_of(rows: Sequence[tuple[int, int]], page: int, width: int) -> tuple[Ragged, list[list[int]]]:
    tables = deal(rows, page=page, pool=POOL)
    made = make(rows, tables, page=page, pool=POOL, width=width)
    for row, pages in enumerate(tables):
        made.block_tables[row, len(pages) :] = pages[-1]
    return made, tables


def check(
    attend: Attend,
    rows: Sequence[tuple[int, int]],
    page: int,
    dim: int,
    dtype: Any,
    *,
    values: Sequence[float] = FOREIGN,
    hurting: bool = True,
) -> None:
    """Zeros in all that is not a row's own, beside the same with values that spread. hurting: rows are spoilt too."""
    heads = 2
    ragged, tables = ragged_of(rows, page, width=-(-max(context for _, context in rows) // page))
    random = np.random.default_rng(3)
    tokens = sum(length for length, _ in rows)
    q = random.standard_normal((tokens, heads, dim)).astype(np.float32)
    k, v = random.standard_normal((2, POOL, page, 1, dim)).astype(np.float32)
    own = sorted({number for pages in tables for number in pages})
    others = [number for number in range(POOL) if number not in own]
    assert 0 in others
    k[others], v[others] = 0.0, 0.0
    arrays = jax.tree.map(jnp.asarray, ragged)
    plain = np.asarray(attend(*(jnp.asarray(x, dtype) for x in (q, k, v)), arrays), np.float32)
    assert np.isfinite(plain).all()
    for value in values:
        worse, worst = k.copy(), v.copy()
        worse[others], worst[others] = value, value
        found = attend(*(jnp.asarray(x, dtype) for x in (q, worse, worst)), arrays)
        np.testing.assert_array_equal(np.asarray(found, np.float32), plain, f"{value} in pages of no row")
    for row, (length, _) in enumerate(rows if hurting else ()):
        hurt, spoilt, spoiled = q.copy(), k.copy(), v.copy()
        mine = slice(int(ragged.starts[row]), int(ragged.starts[row]) + length)
        hurt[mine] = np.nan
        spoilt[tables[row]], spoiled[tables[row]] = np.nan, np.nan
        found = np.asarray(attend(*(jnp.asarray(x, dtype) for x in (hurt, spoilt, spoiled)), arrays), np.float32)
        rest = np.ones(tokens, bool)
        rest[mine] = False
        np.testing.assert_array_equal(found[rest], plain[rest], f"NaN in row {row}")


def compiled(attend: Attend) -> Attend:
    """Compiled in haste, once for all values."""
    made: Attend = jax.jit(attend, compiler_options=HASTE)
    return made


DECODE = ((1, 5), (1, 17), (1, 40))
CHUNKS = ((9, 9), (1, 18), (20, 30))


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("rows", [DECODE, CHUNKS])
def test_xla(rows: Sequence[tuple[int, int]], heads_first: bool) -> None:
    def attend(q: Any, k: Any, v: Any, ragged: Ragged) -> jax.Array:
        if heads_first:
            k, v = (jnp.swapaxes(pool, 1, 2) for pool in (k, v))
        return attention_xla.paged_attention(
            q, k, v, ragged, scale=SCALE, decode=rows is DECODE, heads_first=heads_first
        )

    check(jax.jit(attend), rows, 4 if rows is CHUNKS else 8, 8, jnp.float32)


@pytest.mark.full
def test_hopper_decode() -> None:
    config = DecodeConfig(workers=2, stages=2, tile=64)

    def attend(q: Any, k: Any, v: Any, ragged: Ragged) -> jax.Array:
        work = config.plan(ragged, page=16, window=None)
        return paged_decode(q, k, v, ragged, work, config=config, interpret=interpret, scale=SCALE)[0]

    with without_races() as interpret:
        run = compiled(attend)
        check(lambda *given: jax.block_until_ready(run(*given)), DECODE, 16, 64, jnp.bfloat16)


def test_hopper_plans_name_no_page_but_the_rows_own() -> None:
    """Tiles are whole, also where a table is not: what is added names the row's last page."""
    ragged, tables = ragged_of(DECODE, 16, width=3)
    arrays = jax.tree.map(jnp.asarray, ragged)
    for work in (
        DecodeConfig(workers=2, stages=2, tile=64).plan(arrays, page=16, window=None),
        PrefillConfig(heads=2, keys=64, blocks=2).plan(arrays, page=16),
    ):
        assert work.table.shape == (3, 4)
        for row, pages in enumerate(tables):
            assert set(np.asarray(work.table)[row].tolist()) == set(pages)


@needs_interpreter
def test_hopper_prefill() -> None:
    config = PrefillConfig(heads=2, keys=64, blocks=2)

    def attend(q: Any, k: Any, v: Any, ragged: Ragged) -> jax.Array:
        work = config.plan(ragged, page=16)
        return paged_prefill(q, k, v, ragged, work, config=config, interpret=interpret, scale=SCALE)[0]

    with without_races() as interpret:
        run = compiled(attend)
        check(lambda *given: jax.block_until_ready(run(*given)), ((9, 9), (20, 30)), 16, 64, jnp.bfloat16)


@pytest.mark.parametrize("above", [None, 1])
def test_tpu(above: int | None) -> None:
    options = tpu.Options(TpuConfig(1 if above is None else 8, 16), above, SCALE)

    def attend(q: Any, k: Any, v: Any, ragged: Ragged) -> jax.Array:
        return tpu.run(tpu.Step(q, (k, v), ragged), options)[0]

    check(attend, DECODE if above is None else ((9, 9), (20, 30)), 4 if above else 8, tpu.DIM, jnp.float32)
