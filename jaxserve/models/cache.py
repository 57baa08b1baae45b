"""The layout of the KV cache, defined here only.

Letters: L layers, N pages in the pool, M transferred pages, B page size, K heads of the pool, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec


@dataclass(frozen=True, slots=True)
class State:
    """What layers with linear attention keep of a request, in float32: two arrays per layer, indexed by slot.

    They are [slots, J, K, W], the last inputs of a convolution, and [slots, R, K, D, V], a matrix per value head; with
    heads first, K is the second axis. So they are split over `tp` as pages are.
    """

    layers: tuple[bool, ...]  # by layer of the model: whether it has a state instead of keys and values
    heads: int  # K
    inputs: tuple[int, int]  # J, W
    matrices: tuple[int, int, int]  # R, D, V

    def shapes(self, slots: int, heads_first: bool) -> list[tuple[int, ...]]:
        """Return the shapes of a layer's arrays."""
        axes = [self.inputs, self.matrices]
        return [(slots, *((self.heads, n) if heads_first else (n, self.heads)), *rest) for n, *rest in axes]

    def slot_bytes(self) -> int:
        """Return the bytes of one slot over all layers and all devices of an instance."""
        return 4 * sum(self.layers) * sum(math.prod(shape) for shape in self.shapes(1, False))


@dataclass(frozen=True, slots=True)
class Cache:
    """The layout of a KV cache: per layer `parts` arrays, each [N, B, K, D], or [N, K, B, D] with heads first."""

    layers: int  # L, those with keys and values
    parts: int  # 2: keys and values; 1: latents, which are both
    heads: int  # K, including copies if there are fewer kv heads than shards
    dim: int  # D
    heads_first: bool = False  # in a page; faster for XLA attention on a CPU
    state: State | None = None  # of the other layers

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

    def pools(self, part: Any, state: Sequence[Any] | None = None) -> list[Any]:
        """Return the tree of all pools with `part` for each array, and `state`, by default the same, for states."""
        kept = () if self.state is None else self.state.layers
        held = (part,) * self.parts
        stateful = tuple((part, part) if state is None else state)
        return [stateful if one else held for one in kept] if kept else [held] * self.layers

    def kv(self, pools: Sequence[Any]) -> list[Any]:
        """Return the pools of the layers with keys and values."""
        return [pool for pool, stateful in zip(pools, self._stateful, strict=True) if not stateful]

    def states(self, pools: Sequence[Any]) -> list[Any]:
        """Return the pools of the layers with a state."""
        return [pool for pool, stateful in zip(pools, self._stateful, strict=True) if stateful]

    def joined(self, kv: Sequence[Any], states: Sequence[Any]) -> list[Any]:
        """Return all pools, from those of layers with keys and values and those of layers with a state."""
        each = {False: iter(kv), True: iter(states)}
        return [next(each[stateful]) for stateful in self._stateful]

    @property
    def _stateful(self) -> tuple[bool, ...]:
        return (False,) * self.layers if self.state is None else self.state.layers

    def page_bytes(self, page_size: int, dtype: Any) -> int:
        """Return the bytes of one page over all layers and all devices of an instance."""
        return math.prod(self.kv_buffer_shape(1, page_size)) * int(jnp.dtype(dtype).itemsize)
