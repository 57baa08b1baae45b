"""The timed attention shapes: steps of one layer of Llama-3-8B or DeepSeek, with their bytes and FLOPs.

Letters: T tokens, S rows, N pages in the pool, B page size, H query heads, K kv heads, D head dim, R latent rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
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
    dim: int = 128  # D; of a latent, its columns
    dtype: Any = jnp.bfloat16
    pool_dtype: Any = None  # None: `dtype`
    pools: int = POOLS
    values: int = 0  # R: the columns of a latent that are the values; 0: keys and values have pools of their own

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
        """Bytes that a kernel must move: the cache once per row, queries in, attention outputs out."""
        each = self.dim if self.values else 2 * self.kv_heads * self.dim
        cache = sum(context for _, context in self.rows) * each * jnp.dtype(self.kv_dtype).itemsize
        return float(
            cache + self.tokens * self.heads * (self.dim + (self.values or self.dim)) * jnp.dtype(self.dtype).itemsize
        )

    @property
    def flops(self) -> float:
        """FLOPs of both matmuls over the keys that each token attends to."""
        seen = sum(length * context - length * (length - 1) // 2 for length, context in self.rows)
        return 2.0 * seen * self.heads * (self.dim + (self.values or self.dim))

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

    def pool(self, pages: int, seed: int) -> tuple[jax.Array, ...]:
        """Return the pools of keys and values, or that of latents."""
        shape = pages, self.page, self.kv_heads, self.dim
        return tuple(normal(shape, self.kv_dtype, 100 * seed + part) for part in range(1 if self.values else 2))

    def all_pools(self, pages: int) -> list[tuple[jax.Array, ...]]:
        return [self.pool(pages, 1 + i) for i in range(self.pools)]


def cases(dry: bool) -> Mapping[str, Case]:
    """Return the cases by name. In a dry run each is tiny."""

    def same(name: str, count: int, context: int, length: int = 1, **more: Any) -> Case:
        return Case(name, ((length, context),) * count, **more)

    fp8, int8 = jnp.float8_e4m3fn, jnp.int8
    latent = partial(same, kv_heads=1, dim=576, values=512)
    found = [
        same("decode B64 ctx4096", 64, 4096),
        same("decode B64 ctx4096 fp8", 64, 4096, pool_dtype=fp8),
        same("decode B256 ctx2048", 256, 2048),
        same("decode B1 ctx131072", 1, 131072),
        same("decode B64 ctx4096 T4", 64, 4096, 4),
        same("decode B64 ctx4096 page16", 64, 4096, page=16),
        same("decode B64 ctx4096 int8", 64, 4096, pool_dtype=int8),
        # With one kv head a page is contiguous per head, as all pages would be if heads came before tokens.
        same("decode B64 ctx32768 H4K1", 64, 32768, heads=4, kv_heads=1),
        same("decode B64 ctx32768 H4K1 fp8", 64, 32768, heads=4, kv_heads=1, pool_dtype=fp8),
        same("prefill 8192", 1, 8192, 8192),
        Case("prefill 2048 after 14336", ((2048, 16384),)),
        latent("latent B64 ctx4096 H16", 64, 4096, heads=16),
        latent("latent B64 ctx4096 H128", 64, 4096, heads=128),
        latent("latent B64 ctx4096 H16 fp8", 64, 4096, heads=16, pool_dtype=fp8),
    ]
    return {case.name: _small(case) if dry else case for case in found}


def _small(case: Case) -> Case:
    length = 40 if case.queries > 16 else case.queries
    tiny = replace(case, rows=((length, 40),) * min(2, len(case.rows)), page=16, pools=2, dtype=jnp.float16)
    return replace(tiny, heads=4, kv_heads=1, dim=192, values=128) if case.values else replace(
        tiny, heads=4, kv_heads=min(2, case.kv_heads), dim=64
    )  # fmt: skip


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
