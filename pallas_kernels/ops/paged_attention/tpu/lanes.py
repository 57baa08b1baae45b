"""Pools for heads of 64 to 127 columns on a TPU, whose kernels copy pages as rows of 128 lanes.

If a shard has a multiple of four kv heads of 64, two share a row: [N, B, K / 2, 128]. Other pools
are padded with zeros, [N, B, K, 128], at up to twice the memory. A query is zero in the columns of
the other head of its row, or in the padding, so its scores are those of its own head; of the mixed
values it keeps its own columns. The kernels see K / A heads of 128 and larger groups. The extra
products with zero are free, because the matrix unit is 128 wide.

Letters: T tokens, N pages in the pool, B page size, H query heads, K kv heads, A kv heads in a row,
G = H / K, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.ops.paged_attention.api import AttentionSpec

LANES = 128


@dataclass(frozen=True)
class Row:
    """The layout of the pool rows of one shard."""

    kv_heads: int  # K
    heads: int  # A
    dim: int  # D
    width: int  # lanes, including padding

    @property
    def plain(self) -> bool:
        """Whether a row is exactly one head."""
        return self.heads * self.dim == self.width and self.heads == 1

    def joined(self, k: jax.Array) -> jax.Array:
        """Arrange keys or values [T, K, D] as pool rows, [T, K / A, width]."""
        rows = k.reshape(k.shape[0], self.kv_heads // self.heads, self.heads * self.dim)
        return jnp.pad(rows, ((0, 0), (0, 0), (0, self.width - rows.shape[2])))

    def spread(self, q: jax.Array) -> jax.Array:
        """Pad queries [T, H, D] to [T, H, width], with zeros in the columns of other heads."""
        by_row = self._by_row(q)
        each = [
            jnp.pad(by_row[:, :, i], ((0, 0),) * 3 + ((i * self.dim, self.width - (i + 1) * self.dim),))
            for i in range(self.heads)
        ]
        return jnp.stack(each, axis=2).reshape(*q.shape[:2], self.width)

    def own(self, mixed: jax.Array) -> jax.Array:
        """Take each head's own columns [T, H, D] of mixed values [T, H, width]."""
        by_row = self._by_row(mixed)
        each = [by_row[:, :, i, :, i * self.dim : (i + 1) * self.dim] for i in range(self.heads)]
        return jnp.stack(each, axis=2).reshape(*mixed.shape[:2], self.dim)

    def _by_row(self, x: jax.Array) -> jax.Array:
        """Reshape [T, H, any] to [T, K / A, A, G, any]."""
        tokens, heads, last = x.shape
        return x.reshape(tokens, self.kv_heads // self.heads, self.heads, heads // self.kv_heads, last)


def row_of(spec: AttentionSpec) -> Row:
    """Return the row layout for `spec`.

    8-bit pools keep one head per row: each head has its own scale, so two cannot share a row, and
    padded ones would save nothing.
    """
    if spec.head_dim >= LANES or 2 * spec.head_dim < LANES or spec.stored != spec.dtype:
        return Row(spec.kv_heads, 1, spec.head_dim, spec.head_dim)
    share = 2 * spec.head_dim == LANES and spec.kv_heads % 4 == 0
    return Row(spec.kv_heads, 2 if share else 1, spec.head_dim, LANES)
