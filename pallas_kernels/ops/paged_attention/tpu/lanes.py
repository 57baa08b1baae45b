"""Heads of 64 to 127 on a TPU: what rows of pools hold, for the kernels copy pages as rows of 128 lanes.

Two kv heads of 64 share a row where a shard has four of them or more: [N, B, K / 2, 128]. Others are padded with
zeros, [N, B, K, 128], up to twice the memory. A query has zeros where it meets the other head of its row, or none, so
its scores are those with its own; of the mixed values it keeps the columns of its own. The kernels see K / A heads of
128 and larger groups: the matrix unit, 128 wide, would not have used what they multiply by zero.

Letters: T tokens, N pages in the pool, B page size, H query heads, K kv heads, A of them in a row, G = H / K,
D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.ops.paged_attention.api import Spec

LANES = 128


@dataclass(frozen=True)
class Row:
    """Rows of the pools of one shard."""

    kv_heads: int  # K
    heads: int  # A
    dim: int  # D
    width: int  # lanes, those that are padded included

    @property
    def plain(self) -> bool:
        """Whether a row is a head."""
        return self.heads * self.dim == self.width and self.heads == 1

    def joined(self, k: jax.Array) -> jax.Array:
        """Keys or values [T, K, D] as they lie in the pool, [T, K / A, width]."""
        rows = k.reshape(k.shape[0], self.kv_heads // self.heads, self.heads * self.dim)
        return jnp.pad(rows, ((0, 0), (0, 0), (0, self.width - rows.shape[2])))

    def spread(self, q: jax.Array) -> jax.Array:
        """Queries [T, H, D] -> [T, H, width], zeros beside each."""
        by_row = self._by_row(q)
        each = [
            jnp.pad(by_row[:, :, i], ((0, 0),) * 3 + ((i * self.dim, self.width - (i + 1) * self.dim),))
            for i in range(self.heads)
        ]
        return jnp.stack(each, axis=2).reshape(*q.shape[:2], self.width)

    def own(self, mixed: jax.Array) -> jax.Array:
        """Of mixed values [T, H, width] each head's columns: [T, H, D]."""
        by_row = self._by_row(mixed)
        each = [by_row[:, :, i, :, i * self.dim : (i + 1) * self.dim] for i in range(self.heads)]
        return jnp.stack(each, axis=2).reshape(*mixed.shape[:2], self.dim)

    def _by_row(self, x: jax.Array) -> jax.Array:
        """[T, H, any] -> [T, K / A, A, G, any]."""
        tokens, heads, last = x.shape
        return x.reshape(tokens, self.kv_heads // self.heads, self.heads, heads // self.kv_heads, last)


def row_of(spec: Spec) -> Row:
    """The rows for `spec`. Pools of 8 bits stay as they are: a head has a scale of its own, so two do not share a row,
    and padded they would save nothing."""
    if spec.head_dim >= LANES or 2 * spec.head_dim < LANES or spec.stored != spec.dtype:
        return Row(spec.kv_heads, 1, spec.head_dim, spec.head_dim)
    share = 2 * spec.head_dim == LANES and spec.kv_heads % 4 == 0
    return Row(spec.kv_heads, 2 if share else 1, spec.head_dim, LANES)
