"""Check attention to shared prefixes against float64: in the interpreter, or on a GPU if there is one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.mosaic_gpu import MosaicAttention
from pallas_kernels.layout import MASKED, Ragged, Scales, SharedPrefixes
from pallas_kernels.ops.paged_attention.api import AttentionInputs, AttentionSpec
from pallas_kernels.ops.paged_attention.hopper import cascade
from pallas_kernels.ops.paged_attention.hopper.decode import Config
from tests.support.kernels.checks.decode import LARGEST_ERROR, SCALE, SMALL
from tests.support.kernels.interpreted import cores, haste, on_gpu, seed, without_races
from tests.support.kernels.ragged import make, poisoned
from tests.support.kernels.reference import attention, error, quantized

ROUNDED = 1.5  # the two parts of a result are rounded before they are merged

# Rows (group, tokens, context) of two groups of 4 and 2 pages, and of none.
DECODES = ((1, 1, 70), (1, 1, 66), (2, 1, 40), (0, 1, 33), (1, 1, 81), (2, 1, 33), (1, 1, 90))
DRAFTS = ((1, 1, 70), (1, 5, 69), (2, 16, 48), (0, 3, 33), (1, 2, 81), (2, 1, 33), (1, 16, 90))
CHUNKS = (*DRAFTS, (1, 30, 94), (0, 20, 20), (2, 17, 60))
PREFIXES = (4, 2)


@dataclass(frozen=True)
class Problem:
    """Random values for rows (group, tokens, context), NaN in the pages of no row; group 0: none."""

    prefixes: tuple[int, ...]  # pages of each group
    rows: tuple[tuple[int, int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    page: int = 16
    dtype: Any = jnp.bfloat16
    stored: Any = None  # dtype of the pools; None: `dtype`
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    decode: bool = False  # rows of one token
    few: bool = False  # rows of up to 16 tokens
    padded: int = 2  # extra rows and tokens
    pool: int = 64  # pages

    @property
    def spec(self) -> AttentionSpec:
        """What an engine describes; the interpreter pretends to have few cores."""
        return AttentionSpec(
            jnp.dtype(self.dtype).name, self.heads, self.kv_heads, self.dim, self.page, (self.window,), platform="gpu",
            cores=cores(), interpret=not on_gpu(), kv_dtype=jnp.dtype(self.stored or self.dtype).name,
        )  # fmt: skip

    def deal(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the shared pages of each group, and all pages of each row; never page 0."""
        free = iter((1 + np.random.default_rng(1).permutation(self.pool - 1)).tolist())
        heads = [[next(free) for _ in range(pages)] for pages in self.prefixes]
        tables = []
        for group, _, context in self.rows:
            shared = heads[group - 1] if group else []
            tables.append([*shared, *(next(free) for _ in range(-(-context // self.page) - len(shared)))])
        return heads, tables

    def ragged(self) -> Ragged:
        """Return the step, with a group more than it has."""
        groups = [group for group, *_ in self.rows]
        rows = [row[1:] for row in self.rows]
        tokens = sum(length for length, _ in rows) + self.padded
        ragged = make(
            rows, self.deal()[1], page=self.page, pool=self.pool, tokens=tokens, padded_rows=len(rows) + self.padded
        )
        leaders = [groups.index(group + 1) for group in range(len(self.prefixes))]
        pages = np.array([*self.prefixes, 0], np.int32)
        named = np.array([*groups, *[0] * self.padded], np.int32)
        shared = SharedPrefixes(named, np.array([*leaders, 0], np.int32), pages, pages * self.page)
        if self.decode:
            ragged = ragged._replace(starts=np.arange(len(named), dtype=np.int32))
        return ragged._replace(shared=shared)

    def arrays(self) -> tuple[Any, Any, tuple[Any, Any], Scales | None]:
        """Return q [T, H, D], k and v of the step as [2, T, K, D], the pools, and scales."""
        random = np.random.default_rng(seed(7))
        tokens = len(self.ragged().rows)
        q = jnp.asarray(random.standard_normal((tokens, self.heads, self.dim)), self.dtype)
        new = jnp.asarray(random.standard_normal((2, tokens, self.kv_heads, self.dim)), self.dtype)
        pools = random.standard_normal((2, self.pool, self.page, self.kv_heads, self.dim)).astype(np.float32)
        tables = self.deal()[1]
        if self.stored is None:
            return q, new, tuple(poisoned(x.astype(self.dtype), tables) for x in pools), None
        scales = Scales(*(np.float32(each) * (1 + np.arange(self.kv_heads, dtype=np.float32)) for each in (0.03, 0.02)))
        small = [quantized(x, by, self.stored) for x, by in zip(pools, scales, strict=True)]
        return q, new, tuple(poisoned(x, tables) for x in small), Scales(*map(jnp.asarray, scales))

    def grouped(self, longest: int) -> list[bool]:
        """Return of each row whether it is in a group: no longer than the window, and of up to `longest` tokens."""
        window = self.window or np.inf
        return [bool(group) and length <= longest and context <= window for group, length, context in self.rows]


def check_shared(problem: Problem, config: Config = SMALL) -> None:
    """Check the launch that reads shared pages, and that it leaves other tokens out."""
    ragged, (q, _, pools, scales) = problem.ragged(), problem.arrays()
    heads, _ = problem.deal()
    options: dict[str, Any] = {"scale": SCALE, "softcap": problem.softcap, "scales": scales}

    # One program, compiled without optimization, because compiling takes most of the time.
    @partial(jax.jit, compiler_options=haste())
    def step(q: jax.Array, k: jax.Array, v: jax.Array, ragged: Ragged) -> tuple[jax.Array, jax.Array]:
        groups = cascade.plan(ragged, config, page=problem.page, window=problem.window)
        return cascade.attend_shared(
            q, k, v, groups, config=config, window=problem.window, interpret=interpret, **options
        )

    with without_races() as interpret:
        out, lse = map(np.asarray, jax.block_until_ready(step(q, *pools, ragged)))
    # A token that sees all shared keys is to the reference a row of its own.
    mine = problem.grouped(config.queries)
    group = [problem.rows[row][0] - 1 if row < len(mine) and mine[row] else -1 for row in ragged.rows]
    tokens = np.flatnonzero(np.array(group) >= 0)
    tables = [heads[group[token]] for token in tokens]
    alone = make([(1, len(table) * problem.page) for table in tables], tables, page=problem.page, pool=problem.pool)
    want, sums = attention(q[tokens], *pools, alone, window=None, **options)
    assert error(out[tokens], want) < LARGEST_ERROR[jnp.dtype(problem.dtype).name]
    np.testing.assert_allclose(lse[tokens], sums, atol=2e-3 if scales else 1e-4, rtol=1e-6)
    assert np.all(np.delete(lse, tokens, axis=0) == np.float32(MASKED))


def check(problem: Problem) -> None:
    """Check a layer as an engine calls it, and that rows without a group have the bits of plain attention.

    These bits depend on where rows are split over workers, so they are compared if no row is.
    """
    ragged, (q, new, pools, scales) = problem.ragged(), problem.arrays()
    layer = MosaicAttention(problem.spec, problem.decode, problem.few)
    sinks = jnp.linspace(-1, 4, problem.heads) if problem.sinks else None
    options: dict[str, Any] = {"scale": SCALE, "window": problem.window, "softcap": problem.softcap}

    @partial(jax.jit, compiler_options=haste())
    def step(q: jax.Array, new: jax.Array, pools: Any, ragged: Ragged) -> Any:
        work = layer.plan(ragged)
        split = jnp.any(work.decode[0].splits > 1) if work.decode else False
        inputs = AttentionInputs(q, *new, None, sinks=sinks, scales=scales, **options)
        return *layer(inputs, pools, work), split

    assert ragged.shared is not None
    with without_races():
        out, after, split = jax.block_until_ready(step(q, new, pools, ragged))
        apart = ragged._replace(shared=ragged.shared._replace(group=0 * ragged.shared.group))
        ungrouped, *_ = jax.block_until_ready(step(q, new, pools, apart))
        plain, *_ = jax.block_until_ready(step(q, new, pools, ragged._replace(shared=None)))
    want, _ = attention(q, *after, ragged, sinks=sinks, scales=scales, **options)
    out, ungrouped, plain = (np.asarray(x, np.float32) for x in (out, ungrouped, plain))
    assert error(out, want) < ROUNDED * LARGEST_ERROR[jnp.dtype(problem.dtype).name]
    np.testing.assert_array_equal(ungrouped, plain)
    mine = problem.grouped(len(q))
    alone = [row >= len(mine) or not mine[row] for row in ragged.rows]
    assert any(mine) and not all(alone)
    if not split:
        np.testing.assert_array_equal(out[alone], plain[alone])
