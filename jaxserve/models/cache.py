"""The layout of the KV cache, defined here only.

Letters: L layers, N pages in the pool, M transferred pages, B page size, K heads of the pool, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec


@dataclass(frozen=True, slots=True)
class Cache:
    """The layout of a KV cache: per layer `parts` arrays, each [N, B, K, D], or [N, K, B, D] with heads first."""

    layers: int  # L
    parts: int  # 2: keys and values; 1: latents, which are both
    heads: int  # K, including copies if there are fewer kv heads than shards
    dim: int  # D
    heads_first: bool = False  # in a page; faster for XLA attention on a CPU

    @property
    def latent(self) -> bool:
        """Whether the cache holds latents (MLA)."""
        return self.parts == 1

    def shape(self, pages: int, page_size: int) -> tuple[int, int, int, int]:
        """Return the shape of an array: [N, B, K, D], or [N, K, B, D] with heads first."""
        page = (self.heads, page_size) if self.heads_first else (page_size, self.heads)
        return pages, *page, self.dim

    @property
    def partition(self) -> PartitionSpec:
        """The partition of an array: heads over `tp`. The spec must come from `for_tp` of the mesh's size.

        Steps must also name it in `out_shardings`: on one device jit would otherwise return an unsharded
        pool, and compile again when that pool is passed in.
        """
        return PartitionSpec(None, "tp") if self.heads_first else PartitionSpec(None, None, "tp")

    def kv_buffer_shape(self, pages: int, page_size: int) -> tuple[int, ...]:
        """Return the shape of a contiguous KV buffer: [L, parts, M, B, K, D], or with K before B."""
        return self.layers, self.parts, *self.shape(pages, page_size)

    @property
    def kv_buffer_partition(self) -> PartitionSpec:
        """The partition of a contiguous KV buffer, equal to that of the pool's pages."""
        return PartitionSpec(None, None, *self.partition)

    def pools(self, part: Any) -> list[Any]:
        """Return the tree of all pools with `part` for each array."""
        return [(part,) * self.parts] * self.layers

    def page_bytes(self, page_size: int, dtype: Any) -> int:
        """Return the bytes of one page over all layers and all devices of an instance."""
        return math.prod(self.kv_buffer_shape(1, page_size)) * int(jnp.dtype(dtype).itemsize)
