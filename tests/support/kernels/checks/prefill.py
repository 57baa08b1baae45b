"""Check prefill attention against float64: in the interpreter, or on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import MASKED, Ragged, Scales
from pallas_kernels.mosaic.spec import AttentionShape
from pallas_kernels.ops.paged_attention.hopper.prefill import Config, paged_prefill
from pallas_kernels.ops.paged_attention.sinks import with_sinks
from tests.support.kernels.interpreted import cores, haste, seed, without_races
from tests.support.kernels.ragged import deal, make, poisoned
from tests.support.kernels.reference import attention, error, quantized

LARGEST_ERROR = {"bfloat16": 4e-3, "float16": 6e-4}  # relative, over the whole output
POOL, SCALE = 40, 0.15
SMALL = Config(heads=2, keys=64, blocks=2)
MIXED = (
    (40, 70),
    (3, 9),
    (20, 20),
    (17, 150),
)  # a chunk after cached tokens, a decode row, a prompt, a long context


@dataclass(frozen=True)
class Problem:
    """Random values for rows of (tokens, context), and NaN in the pages of no row."""

    rows: Sequence[tuple[int, int]] = MIXED
    heads: int = 2
    kv_heads: int = 1
    dim: int = 64
    page: int = 16
    dtype: Any = jnp.bfloat16
    kv_dtype: Any = None  # of 8-bit pools
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    tables: tuple[tuple[int, ...], ...] | None = None
    padded: int = 0  # extra rows and tokens
    pool: int = POOL  # pages
    k_factor: float = 1.0  # of the scales of 8-bit keys that fit these values

    @property
    def dealt(self) -> Sequence[Sequence[int]]:
        """The pages of each row."""
        return self.tables or deal(self.rows, page=self.page, pool=self.pool)

    def shape(self) -> AttentionShape:
        """Return what a config is chosen for."""
        sizes = 1, self.heads, self.kv_heads, self.dim, self.page, 1
        return AttentionShape(*sizes, self.dtype, self.kv_dtype or self.dtype, cores())

    def ragged(self) -> Ragged:
        tokens = sum(length for length, _ in self.rows) + self.padded
        rows = len(self.rows) + self.padded
        made = make(self.rows, self.dealt, page=self.page, pool=self.pool, tokens=tokens, padded_rows=rows)
        return jax.tree.map(jnp.asarray, made)

    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        random = np.random.default_rng(seed(7))
        tokens = sum(length for length, _ in self.rows) + self.padded
        pool = (self.pool, self.page, self.kv_heads, self.dim)
        q, k, v = (random.standard_normal(shape) for shape in ((tokens, self.heads, self.dim), pool, pool))
        if self.kv_dtype is None:
            k, v = k.astype(self.dtype), v.astype(self.dtype)
        else:
            fit = replace(self, k_factor=1.0).scales or ()
            k, v = (quantized(x, scale, self.kv_dtype) for x, scale in zip((k, v), fit, strict=True))
        return jnp.asarray(q, self.dtype), poisoned(k, self.dealt), poisoned(v, self.dealt)

    @property
    def scales(self) -> Scales | None:
        """The scales with which values of about one use most of the 8-bit range, those of keys times `k_factor`."""
        if self.kv_dtype is None:
            return None
        k = jnp.linspace(0.02, 0.03, self.kv_heads)
        return Scales(k * self.k_factor, k[::-1] + 0.01)

    def sink_scores(self) -> jax.Array | None:
        """Return scores [H] of sinks that take a part of the weight, or None."""
        return jnp.linspace(-1, 4, self.heads) if self.sinks else None


def compute(problem: Problem, config: Config) -> tuple[jax.Array, jax.Array]:
    # Compiled without optimization, because compiling takes most of the time.
    hasty = haste()

    @partial(jax.jit, static_argnames=("interpret",), compiler_options=hasty)
    def run(q: Any, k: Any, v: Any, ragged: Ragged, interpret: Any) -> tuple[jax.Array, jax.Array]:
        work = config.plan(ragged, page=problem.page, window=problem.window)
        options = {"window": problem.window, "softcap": problem.softcap, "scales": problem.scales}
        out, lse = paged_prefill(q, k, v, ragged, work, scale=SCALE, config=config, interpret=interpret, **options)
        sinks = problem.sink_scores()
        return out if sinks is None else with_sinks(out, lse, sinks), lse

    with without_races() as interpret:
        return jax.block_until_ready(run(*problem.arrays(), problem.ragged(), interpret))


def check(problem: Problem, config: Config) -> None:
    ragged = problem.ragged()
    out, lse = compute(problem, config)
    options = {"window": problem.window, "softcap": problem.softcap, "scales": problem.scales}
    want, sums = attention(*problem.arrays(), ragged, scale=SCALE, sinks=problem.sink_scores(), **options)
    lengths = np.append(np.asarray(ragged.lengths), 0)
    others = lengths[np.asarray(ragged.rows)] <= config.above
    want[others], sums[others] = 0, MASKED
    assert error(out, want) < LARGEST_ERROR[jnp.dtype(problem.dtype).name]
    assert not np.any(np.asarray(out)[others])
    np.testing.assert_allclose(lse, sums, atol=2e-2, rtol=1e-6)


CASES = {
    "head dim 256": (Problem(dim=256), SMALL),
    "head dim 256, a window and a soft cap": (Problem(dim=256, heads=4, kv_heads=2, window=33, softcap=4.0), SMALL),
    "head dim 256, each block one item": (Problem(dim=256, heads=3), Config(heads=1, keys=64, blocks=1000)),
    "float8": (Problem(kv_dtype=jnp.float8_e4m3fn, heads=4, kv_heads=2), SMALL),
    "float8, head dim 128": (Problem(kv_dtype=jnp.float8_e4m3fn, dim=128), replace(SMALL, keys=128, stages=1)),
    "float8 beside float16": (Problem(kv_dtype=jnp.float8_e4m3fn, dtype=jnp.float16), SMALL),
    "int8, three stages": (Problem(kv_dtype=jnp.int8), replace(SMALL, stages=3)),
    "int8, one stage": (Problem(kv_dtype=jnp.int8), replace(SMALL, stages=1)),
    "int8, a page of two tiles": (Problem(kv_dtype=jnp.int8, page=128), SMALL),
    "int8, a window, a soft cap and padding": (Problem(kv_dtype=jnp.int8, window=20, softcap=5.0, padded=5), SMALL),
    "int8, each block one item": (Problem(kv_dtype=jnp.int8), replace(SMALL, blocks=1000)),
    "one head of a group of three": (Problem(heads=3), Config(heads=1, keys=64, blocks=1)),
    "groups of four": (Problem(heads=8, kv_heads=2), Config(heads=4, keys=64, blocks=3)),
    "groups of eight, tiles of 16 tokens": (Problem(heads=8), Config(heads=8, keys=64, blocks=2)),
    "two heads of a group of six": (Problem(heads=6), SMALL),
    "each block one item": (Problem(), replace(SMALL, blocks=1000)),
    "keys of 128": (Problem(), replace(SMALL, keys=128)),
    "three stages": (Problem(), replace(SMALL, stages=3)),
    "one stage": (Problem(), replace(SMALL, stages=1)),
    "no turns": (Problem(), replace(SMALL, ping_pong=False)),
    "overlap": (Problem(), replace(SMALL, overlap=True)),
    "overlap, no turns": (Problem(), replace(SMALL, overlap=True, ping_pong=False)),
    "ahead": (Problem(), replace(SMALL, ahead=True)),
    "ahead, int8, an item each": (Problem(kv_dtype=jnp.int8), replace(SMALL, ahead=True, blocks=1000)),
    "ahead, overlap, a window and padding": (
        Problem(heads=4, kv_heads=2, dim=128, window=20, padded=5),
        replace(SMALL, ahead=True, overlap=True),
    ),
    "ahead, nothing but decode rows": (Problem(rows=((1, 5), (2, 9)), padded=30), replace(SMALL, ahead=True)),
    "weights in registers": (Problem(), replace(SMALL, p_in_smem=False)),
    "float16": (Problem(dtype=jnp.float16), SMALL),
    "head dim 128": (Problem(dim=128), SMALL),
    "a page of two tiles": (Problem(page=128), SMALL),
    "a window": (Problem(window=33), SMALL),
    "a window of one key": (Problem(window=1), SMALL),
    "a window wider than any context": (Problem(window=1000), SMALL),
    "a soft cap": (Problem(softcap=3.0), SMALL),
    "a window, a soft cap and padding": (Problem(window=20, softcap=5.0, padded=5), SMALL),
    "fewer tokens than a tile": (Problem(rows=((5, 5),)), replace(SMALL, above=0)),
    "around the edges of pages and tiles": (Problem(rows=((17, 31), (32, 32), (33, 33), (16, 16), (64, 65))), SMALL),
    "shared pages": (
        Problem(rows=((20, 40), (20, 40), (18, 36)), tables=((5, 9, 2), (5, 9, 7), (5, 3, 2))),
        SMALL,
    ),
    "sinks": (Problem(sinks=True, heads=4), SMALL),
    "nothing but decode rows": (Problem(rows=((1, 5), (2, 9)), padded=30), SMALL),
}  # fmt: skip
