"""What a model keeps of each token: the one place that knows the form of a KV cache.

Letters: L layers, N pages in the pool, M pages moved, B page size, K heads of the pool, D width of one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec


@dataclass(frozen=True, slots=True)
class Cache:
    """The form of a KV cache: per layer `parts` arrays, each [N, B, K, D], or [N, K, B, D] with heads first."""

    layers: int  # L
    parts: int  # 2: keys and values; 1: a latent, which is both
    heads: int  # K, a copy for each shard where there are fewer than shards
    dim: int  # D
    heads_first: bool = False  # in a page, as attention in XLA on a CPU wants it

    @property
    def latent(self) -> bool:
        """Whether the keys are the values."""
        return self.parts == 1

    def shape(self, pages: int, page_size: int) -> tuple[int, int, int, int]:
        """[N, B, K, D] of each array of a layer, or [N, K, B, D]."""
        page = (self.heads, page_size) if self.heads_first else (page_size, self.heads)
        return pages, *page, self.dim

    @property
    def partition(self) -> PartitionSpec:
        """How an array lies on the mesh: heads over `tp`. The cache must be that of `for_tp` of the mesh's size.

        Name it in `out_shardings` of the step too: on one device jit would call the new pool unsharded, and compile
        again when it comes back.
        """
        return PartitionSpec(None, "tp") if self.heads_first else PartitionSpec(None, None, "tp")

    def parcel_shape(self, pages: int, page_size: int) -> tuple[int, ...]:
        """[L, parts, M, B, K, D] of a piece of a parcel, or with K before B."""
        return self.layers, self.parts, *self.shape(pages, page_size)

    @property
    def parcel_partition(self) -> PartitionSpec:
        """How a piece of a parcel lies on the mesh: as the pool's pages."""
        return PartitionSpec(None, None, *self.partition)

    def pools(self, part: Any) -> list[Any]:
        """`part`, which describes one array, in the place of each of them."""
        return [(part,) * self.parts] * self.layers

    def page_bytes(self, page_size: int, dtype: Any) -> int:
        """Bytes of one page over all layers, whole on all devices of an instance."""
        return math.prod(self.parcel_shape(1, page_size)) * int(jnp.dtype(dtype).itemsize)
