"""Check isolation of rows: in the interpreter, or on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import Ragged, Scales
from pallas_kernels.ops.mla import hopper as latent
from pallas_kernels.ops.paged_attention.hopper.decode import Config as DecodeConfig
from pallas_kernels.ops.paged_attention.hopper.decode import paged_decode
from pallas_kernels.ops.paged_attention.hopper.prefill import Config as PrefillConfig
from pallas_kernels.ops.paged_attention.hopper.prefill import paged_prefill
from tests.support.kernels.interpreted import haste, seed, without_races
from tests.support.kernels.ragged import deal, make

POOL, SCALE = 24, 0.15
FOREIGN = [np.inf, -np.inf, np.nan]
BYTES = {jnp.float8_e4m3fn: [448.0, -448.0, np.nan], jnp.int8: [127.0, -128.0]}  # values that 8-bit pools can hold
Attend = Callable[[Any, Any, Any, Ragged], jax.Array]


def ragged_of(rows: Sequence[tuple[int, int]], page: int, width: int) -> tuple[Ragged, list[list[int]]]:
    tables = deal(rows, page=page, pool=POOL)
    return make(rows, tables, page=page, pool=POOL, width=width), tables


def check(
    attend: Attend,
    rows: Sequence[tuple[int, int]],
    page: int,
    dim: int,
    dtype: Any,
    *,
    stored: Any = None,  # dtype of the pools; None: `dtype`
    heads: int = 2,
    values: Sequence[float] = FOREIGN,
    hurting: bool = True,
    tails: bool = False,
) -> None:
    """Compare a step whose foreign values are zeros with the same step with values that would spread.

    `hurting`: each row in turn is spoiled with the last of `values`, and its queries with NaN.
    `tails`: the slots after each row's context in its last page are spoiled too. Hopper's kernels
    need these slots finite, which the engine ensures (tests/engine:
    test_a_row_that_is_not_finite_fails_alone, test_a_draft_that_is_not_finite_...).
    """
    ragged, tables = ragged_of(rows, page, width=-(-max(context for _, context in rows) // page))
    random = np.random.default_rng(seed(3))
    tokens = sum(length for length, _ in rows)
    q = random.standard_normal((tokens, heads, dim)).astype(np.float32)
    k, v = random.standard_normal((2, POOL, page, 1, dim)).astype(np.float32)
    if stored is not None:
        k, v = 20 * k, 20 * v
    own = sorted({number for pages in tables for number in pages})
    others = [number for number in range(POOL) if number not in own]
    assert 0 in others
    foreign = np.zeros((POOL, page), bool)
    foreign[others] = True
    for (_, context), pages in zip(rows, tables, strict=True):
        foreign[pages[-1], (context - 1) % page + 1 :] = tails
    k[foreign], v[foreign] = 0.0, 0.0
    arrays = jax.tree.map(jnp.asarray, ragged)

    def run(q: Any, k: Any, v: Any) -> Any:
        pools = (jnp.asarray(x).astype(dtype if stored is None else stored) for x in (k, v))
        return np.asarray(attend(jnp.asarray(q, dtype), *pools, arrays), np.float32)

    plain = run(q, k, v)
    assert np.isfinite(plain).all() and np.any(plain)
    for value in values:
        worse, worst = k.copy(), v.copy()
        worse[foreign], worst[foreign] = value, value
        np.testing.assert_array_equal(run(q, worse, worst), plain, f"{value} in unused places")
    for row, (length, _) in enumerate(rows if hurting else ()):
        hurt, spoilt, spoiled = q.copy(), k.copy(), v.copy()
        mine = slice(int(ragged.starts[row]), int(ragged.starts[row]) + length)
        hurt[mine] = np.nan
        spoilt[tables[row]], spoiled[tables[row]] = values[-1], values[-1]
        found = run(hurt, spoilt, spoiled)
        rest = np.ones(tokens, bool)
        rest[mine] = False
        np.testing.assert_array_equal(found[rest], plain[rest], f"NaN in row {row}")


def compiled(attend: Attend) -> Attend:
    """Compile once for all values, without optimization."""
    made: Attend = jax.jit(attend, compiler_options=haste())
    return made


DECODE = ((1, 5), (1, 17), (1, 40))
CHUNKS = ((9, 9), (1, 18), (20, 30))
DRAFTS = ((4, 20), (1, 17), (3, 40))  # tokens to verify
SCALES = Scales(np.full(1, 0.03, np.float32), np.full(1, 0.02, np.float32))  # of numpy: jax is not started to import
WARPS = DecodeConfig(workers=2, stages=2, tile=64, consumers=1, warps=True)


def decode(config: DecodeConfig, stored: Any = None, rows: Sequence[tuple[int, int]] = DECODE) -> None:
    def attend(interpret: Any, q: Any, k: Any, v: Any, ragged: Ragged) -> jax.Array:
        work = config.plan(ragged, page=16, window=None)
        options = {} if stored is None else {"scales": SCALES}
        return paged_decode(q, k, v, ragged, work, config=config, interpret=interpret, scale=SCALE, **options)[0]

    interpreted(attend, rows, 64, stored)


def interpreted(
    attend: Callable[..., jax.Array], rows: Sequence[tuple[int, int]], dim: int, stored: Any, **more: Any
) -> None:
    """Check a Hopper kernel; `attend` takes the interpreter's settings as its first argument."""
    with without_races() as interpret:
        run = compiled(partial(attend, interpret))
        values = FOREIGN if stored is None else BYTES[stored]
        wait: Attend = lambda *given: jax.block_until_ready(run(*given))  # noqa: E731
        check(wait, rows, 16, dim, jnp.bfloat16, stored=stored, values=values, **more)


LATENT = latent.Config(workers=2)


def mla(config: latent.Config, stored: Any = None, rows: Sequence[tuple[int, int]] = DECODE) -> None:
    """Check latents, whose pool is keys and values at once."""

    def attend(interpret: Any, q: Any, pool: Any, _: Any, ragged: Ragged) -> jax.Array:
        work = config.plan(ragged, page=16, window=None)
        return latent.paged_mla(q, pool, work, values=128, config=config, interpret=interpret, scale=SCALE)[0]

    interpreted(attend, rows, 128 + latent.TURNING, stored, heads=4)


def prefill(stored: Any = None) -> None:
    config = PrefillConfig(heads=2, keys=64, blocks=2)

    def attend(interpret: Any, q: Any, k: Any, v: Any, ragged: Ragged) -> jax.Array:
        work = config.plan(ragged, page=16)
        options = {} if stored is None else {"scales": SCALES}
        return paged_prefill(q, k, v, ragged, work, config=config, interpret=interpret, scale=SCALE, **options)[0]

    interpreted(attend, ((9, 9), (20, 30)), 64, stored)
