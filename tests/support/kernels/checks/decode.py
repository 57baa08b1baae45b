"""Check decode attention against float64: in the interpreter, or on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import MASKED, Ragged, Scales
from pallas_kernels.mosaic.spec import AttentionShape
from pallas_kernels.ops.paged_attention.hopper.decode import Config, paged_decode
from pallas_kernels.ops.paged_attention.sinks import with_sinks
from tests.support.kernels.interpreted import cores, haste, seed, without_races
from tests.support.kernels.ragged import deal, make, poisoned
from tests.support.kernels.reference import attention, error, quantized

LARGEST_ERROR = {"bfloat16": 4e-3, "float16": 6e-4}  # relative, over the whole output
POOL, SCALE = 24, 0.15
SMALL = Config(workers=2, stages=2)


@dataclass(frozen=True)
class Problem:
    """Random values for rows of (tokens, context), and NaN in the pages of no row."""

    rows: Sequence[tuple[int, int]]
    heads: int = 2
    kv_heads: int = 1
    dim: int = 64
    page: int = 64
    dtype: Any = jnp.bfloat16
    stored: Any = None  # dtype of the pools; None: `dtype`
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    tables: tuple[tuple[int, ...], ...] | None = None
    padded: int = 0  # extra rows and tokens
    scale: float = SCALE
    pool: int = POOL  # pages
    k_factor: float = 1.0  # of the scales of 8-bit keys that fit these values

    @property
    def dealt(self) -> Sequence[Sequence[int]]:
        """The pages of each row."""
        return self.tables or deal(self.rows, page=self.page, pool=self.pool)

    def shape(self, queries: int = 1) -> AttentionShape:
        """Return what a config is chosen for."""
        sizes = 1, self.heads, self.kv_heads, self.dim, self.page, queries
        return AttentionShape(*sizes, self.dtype, self.stored or self.dtype, cores())

    def ragged(self) -> Ragged:
        tokens = sum(length for length, _ in self.rows) + self.padded
        rows = len(self.rows) + self.padded
        return make(self.rows, self.dealt, page=self.page, pool=self.pool, tokens=tokens, padded_rows=rows)

    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array, Scales | None]:
        random = np.random.default_rng(seed(7))
        tokens = sum(length for length, _ in self.rows) + self.padded
        q = jnp.asarray(random.standard_normal((tokens, self.heads, self.dim)), self.dtype)
        pools = random.standard_normal((2, self.pool, self.page, self.kv_heads, self.dim)).astype(np.float32)
        if self.stored is None:
            k, v = (poisoned(x.astype(self.dtype), self.dealt) for x in pools)
            return q, k, v, None
        scales = Scales(*(np.float32(each) * (1 + np.arange(self.kv_heads, dtype=np.float32)) for each in (0.03, 0.02)))
        k, v = (poisoned(quantized(x, by, self.stored), self.dealt) for x, by in zip(pools, scales, strict=True))
        return q, k, v, Scales(jnp.asarray(scales.k * np.float32(self.k_factor)), jnp.asarray(scales.v))

    def sink_scores(self) -> jax.Array | None:
        """Return scores [H] of sinks that take a part of the weight, or None."""
        return jnp.linspace(-1, 4, self.heads) if self.sinks else None


def compute(problem: Problem, config: Any, attend: Callable[..., Any] = paged_decode) -> tuple[jax.Array, jax.Array]:
    """Plan and attend; sinks are applied to the result."""
    ragged, (q, k, v, scales) = problem.ragged(), problem.arrays()
    options: dict[str, Any] = {"softcap": problem.softcap, "scales": scales, "config": config}
    sinks = problem.sink_scores()

    # One program, compiled without optimization, because compiling takes most of the time.
    @partial(jax.jit, compiler_options=haste())
    def step(q: jax.Array, k: jax.Array, v: jax.Array, ragged: Ragged) -> tuple[jax.Array, jax.Array]:
        window = {"window": problem.window}
        work = config.plan(ragged, page=problem.page, **window)
        out, lse = attend(q, k, v, ragged, work, scale=problem.scale, interpret=interpret, **window, **options)
        return out if sinks is None else with_sinks(out, lse, sinks), lse

    with without_races(in_order=getattr(config, "merge", False)) as interpret:
        return jax.block_until_ready(step(q, k, v, ragged))


def check(problem: Problem, config: Config) -> None:
    scales = problem.arrays()[-1]
    compare(problem, compute(problem, config), lambda length: 1 <= length <= config.queries, 2e-3 if scales else 1e-4)


def compare(problem: Problem, results: Any, takes: Callable[[int], bool], atol: float) -> None:
    """Compare with float64; `takes` says of which lengths rows are computed, others are zeros and MASKED."""
    ragged, (q, k, v, scales), (out, lse) = problem.ragged(), problem.arrays(), results
    want, sums = attention(
        q, k, v, ragged, scale=problem.scale, window=problem.window, softcap=problem.softcap, scales=scales,
        sinks=problem.sink_scores(),
    )  # fmt: skip
    lengths = np.append(ragged.lengths, 0)[ragged.rows]  # [T], length of each token's row
    others = np.array([not takes(length) for length in lengths])
    want[others], sums[others] = 0, MASKED
    assert out.dtype == problem.dtype
    assert error(out, want) < LARGEST_ERROR[jnp.dtype(problem.dtype).name]
    np.testing.assert_allclose(lse, sums, atol=atol, rtol=1e-6)
    assert not np.any(np.asarray(out)[others])


EDGES = ((1, 1), (1, 63), (1, 64), (0, 0), (1, 65), (1, 200))  # around a page and a tile, and several tiles


class Mixed:
    """Steps of one program, of rows of any lengths, in which pages of no row hold NaN."""

    ROWS, TOKENS, PAGE, MOST = 4, 12, 16, 96  # MOST: tokens of a context

    def __init__(self, config: Config) -> None:
        self.config = config
        self.width = -(-self.MOST // self.PAGE)

        @partial(jax.jit, compiler_options=haste(), static_argnames="interpret")
        def step(q: jax.Array, k: jax.Array, v: jax.Array, ragged: Ragged, *, interpret: Any) -> Any:
            work = config.plan(ragged, page=self.PAGE)
            return paged_decode(q, k, v, ragged, work, config=config, interpret=interpret, scale=SCALE, clean=False)

        self.step = step

    def check(self, rows: list[tuple[int, int]]) -> None:
        """Check rows of (tokens, context), and that the tokens after them are blank."""
        pool = 1 + self.ROWS * self.width
        tables = deal(rows, page=self.PAGE, pool=pool)
        ragged = make(
            rows, tables, page=self.PAGE, pool=pool, tokens=self.TOKENS, padded_rows=self.ROWS, width=self.width
        )
        for row, pages in enumerate(tables):
            ragged.block_tables[row, len(pages) :] = pages[-1]
        random = np.random.default_rng(seed(11))
        q = jnp.asarray(random.standard_normal((self.TOKENS, 4, 64)), jnp.bfloat16)
        k, v = random.standard_normal((2, pool, self.PAGE, 2, 64)).astype(np.float32)
        own = [page for pages in tables for page in pages]
        foreign = np.setdiff1d(np.arange(pool), own)
        worse, worst = k.copy(), v.copy()
        worse[foreign], worst[foreign] = np.nan, np.nan
        pools = [jnp.asarray(x, jnp.bfloat16) for x in (worse, worst)]
        with without_races(in_order=self.config.merge) as interpret:
            out, lse = jax.block_until_ready(self.step(q, *pools, ragged, interpret=interpret))
        want, sums = attention(
            q, *(jnp.asarray(x, jnp.bfloat16) for x in (k, v)), ragged,
            scale=SCALE, window=None, softcap=None, scales=None,
        )  # fmt: skip
        tokens = sum(length for length, _ in rows)
        assert error(out[:tokens], want[:tokens]) < LARGEST_ERROR["bfloat16"]
        np.testing.assert_allclose(lse[:tokens], sums[:tokens], atol=1e-4, rtol=1e-6)
        assert not np.any(np.asarray(out)[tokens:]) and np.all(np.asarray(lse)[tokens:] == np.float32(MASKED))
