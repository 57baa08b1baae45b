"""The measured attention shapes: steps of one layer of Llama-3-8B, with their bytes and FLOPs.

Letters: T tokens, S rows, N pages in the pool, B page size, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import Ragged

from .timing import POOLS, normal


@dataclass(frozen=True)
class Case:
    """One step: rows of (new tokens, context including them), heads, and the layout of the KV pool."""

    name: str
    rows: tuple[tuple[int, int], ...]
    page: int = 64  # B
    heads: int = 32  # H
    kv_heads: int = 8  # K
    dim: int = 128  # D
    dtype: Any = jnp.bfloat16
    pool_dtype: Any = None  # None: `dtype`
    pools: int = POOLS

    @property
    def tokens(self) -> int:
        return sum(length for length, _ in self.rows)

    @property
    def queries(self) -> int:
        return max(length for length, _ in self.rows)

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)

    @property
    def kv_dtype(self) -> Any:
        return self.pool_dtype or self.dtype

    @property
    def moved(self) -> float:
        """Bytes that a kernel must move: keys and values once per row, queries in, attention outputs out."""
        kv = sum(context for _, context in self.rows) * 2 * self.kv_heads * self.dim * jnp.dtype(self.kv_dtype).itemsize
        return kv + 2 * self.tokens * self.heads * self.dim * jnp.dtype(self.dtype).itemsize

    @property
    def flops(self) -> float:
        """FLOPs of both matmuls over the keys that each token attends to."""
        seen = sum(length * context - length * (length - 1) // 2 for length, context in self.rows)
        return 4.0 * seen * self.heads * self.dim

    def ragged(self, seed: int = 0) -> tuple[Ragged, int]:
        """Return the step over randomly permuted pages, and N. Page 0 belongs to no row."""
        need = [-(-context // self.page) for _, context in self.rows]
        pages = 1 + sum(need)
        order = 1 + np.random.default_rng(seed).permutation(pages - 1).astype(np.int32)
        ends = np.cumsum(need)
        table = np.zeros((len(need), max(need)), np.int32)
        for row, (end, count) in enumerate(zip(ends, need, strict=True)):
            table[row, :count] = order[end - count : end]
        lengths = np.array([length for length, _ in self.rows], np.int32)
        contexts = np.array([context for _, context in self.rows], np.int32)
        starts = np.cumsum(lengths, dtype=np.int32) - lengths
        rows = np.repeat(np.arange(len(need), dtype=np.int32), lengths)
        positions = (np.arange(self.tokens) - starts[rows] + (contexts - lengths)[rows]).astype(np.int32)
        write = table[rows, positions // self.page] * self.page + positions % self.page
        step = Ragged(positions, rows, write, starts, lengths, contexts, table)
        return jax.tree.map(jnp.asarray, step), pages

    def queries_of(self, seed: int = 0) -> jax.Array:
        return normal((self.tokens, self.heads, self.dim), self.dtype, seed)

    def pool(self, pages: int, seed: int) -> tuple[jax.Array, jax.Array]:
        shape = pages, self.page, self.kv_heads, self.dim
        k, v = (normal(shape, self.kv_dtype, 100 * seed + part) for part in (1, 2))
        return k, v

    def all_pools(self, pages: int) -> list[tuple[jax.Array, jax.Array]]:
        """Return the pools of the case. Only the latest case's pools are cached; its kernels share them."""
        return _pools(self, pages)


@lru_cache(maxsize=1)
def _pools(case: Case, pages: int) -> list[tuple[jax.Array, jax.Array]]:
    return [case.pool(pages, 1 + i) for i in range(case.pools)]


def _same(count: int, context: int, length: int = 1) -> tuple[tuple[int, int], ...]:
    return ((length, context),) * count


def _drawn(count: int, contexts: Sequence[int] | np.ndarray) -> tuple[tuple[int, int], ...]:
    return tuple((1, int(context)) for context in np.asarray(contexts)[:count])


def decode_cases(dry: bool) -> list[Case]:
    """Return the decode cases: uniform contexts, and mixtures of contexts of about the same size in bytes."""
    if dry:
        tiny = partial(Case, heads=4, kv_heads=2, dim=64, page=16, dtype=jnp.float16, pools=2)
        return [tiny("decode B2", _same(2, 37))]
    draw = np.random.default_rng(0)
    uniform = draw.integers(1, 8192, 64)
    zipf = np.minimum(128 * draw.zipf(1.3, 64), 32768)
    return [
        Case("decode B64 ctx4096", _same(64, 4096)),
        Case("decode B256 ctx2048", _same(256, 2048)),
        Case("decode B1 ctx131072", _same(1, 131072)),
        Case("decode B64 ctx4096 T4", _same(64, 4096, 4)),
        Case("decode B64 uniform", _drawn(64, uniform)),
        Case("decode B64 zipf", _drawn(64, zipf)),
        Case("decode B64 outlier", _drawn(64, [131072, *[2048] * 63])),
        Case("decode B64 ctx4096 page16", _same(64, 4096), page=16),
        Case("decode B64 ctx4096 page128", _same(64, 4096), page=128),
        Case("decode B8 ctx1024", _same(8, 1024)),
        Case("decode B64 ctx4096 fp8", _same(64, 4096), pool_dtype=jnp.float8_e4m3fn),
        Case("decode B64 ctx4096 int8", _same(64, 4096), pool_dtype=jnp.int8),
        # With one kv head a page is contiguous per head, as all pages would be if heads came before tokens.
        Case("decode B64 ctx32768 H4K1", _same(64, 32768), heads=4, kv_heads=1),
        Case("decode B64 ctx32768 H4K1 fp8", _same(64, 32768), heads=4, kv_heads=1, pool_dtype=jnp.float8_e4m3fn),
    ]


def prefill_cases(dry: bool) -> list[Case]:
    if dry:
        return [Case("prefill 1x40", _same(1, 40, 40), 16, 4, 2, 64, jnp.float16, pools=2)]
    mixed = ((2048, 2048), (1024, 9000), (512, 512), (4096, 4096))
    return [
        Case("prefill 8192", _same(1, 8192, 8192)),
        Case("prefill 16384", _same(1, 16384, 16384)),
        Case("prefill 32768", _same(1, 32768, 32768), pools=2),
        Case("prefill 2048 after 14336", ((2048, 16384),)),
        Case("prefill ragged 4 rows", mixed),
        Case("prefill 1024", _same(1, 1024, 1024)),
    ]


def numeric_case(case: Case, queries: int) -> Case:
    """Return a case with the heads and pages of `case` that is small enough for the float64 reference on the host.

    Its contexts lie around the borders of pages and tiles. queries: tokens of the longest row; 0: prompts.
    """
    if not queries:
        rows: tuple[tuple[int, int], ...] = ((300, 300), (64, 700), (129, 129), (17, 1000))
    else:
        rows = tuple((min(queries, 1 + i * queries // 7), c) for i, c in enumerate((1, 63, 64, 65, 700, 1024, 333)))
        rows = tuple((length, context + length - 1) for length, context in rows)
    return replace(case, name=f"numerics of {case.name}", rows=rows)


def named(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Return the cases of these names. Raises ValueError if one is unknown."""
    known = {case.name: case for case in cases}
    if unknown := set(names) - set(known):
        raise ValueError(f"no case is named {', '.join(sorted(unknown))}")
    return [known[name] for name in names]
