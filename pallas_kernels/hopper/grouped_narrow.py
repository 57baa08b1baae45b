"""Weights of 8 bits in a mixture of experts: what grouped_body.py asks of weights, by the tiles of narrow_tile.py.

Operands are swapped for any number of rows: each consumer widens the 64 outputs that are its own, once for all rows of
the item, and no consumer waits for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat
from pallas_kernels.compat import plgpu
from pallas_kernels.hopper.grouped_body import Item, Refs, Shape
from pallas_kernels.hopper.narrow_tile import CONSUMERS, ROWS, Ring, Tile, bring, summed


@dataclass(frozen=True)
class Narrow:
    """Values [X, I, O] of 8 bits, and scales [X, n, O] float32."""

    tile: Tile

    arrays = 2
    copies = CONSUMERS

    def scratch(self, shape: Shape) -> list[Any]:
        return self.tile.scratch(shape.stages)

    def bring(self, shape: Shape, refs: Refs, item: Item, k: jax.Array, slot: jax.Array) -> None:
        (values, _), (narrow_s, _) = refs.weights, refs.weights_s
        where = item.expert, pl.ds(k * shape.depth, shape.depth)
        bring(values, where, item.column, narrow_s.at[slot], refs.full.at[slot])

    def multiply(self, shape: Shape, refs: Refs, role: jax.Array, item: Item, done: jax.Array) -> jax.Array:
        (_, scale), (narrow_s, wide_s) = refs.weights, refs.weights_s
        outputs = pl.ds(item.column + role * ROWS, ROWS)

        def scale_at(k: jax.Array) -> Any:
            return scale.at[item.expert, lax.div(k, jnp.int32(self.tile.every)), outputs]

        ring = Ring(narrow_s, wide_s, refs.x_s, refs.full, refs.free, shape.stages, role, done)
        total = summed(self.tile, ring, shape.steps, scale_at)
        if self.tile.every:
            return total
        one = compat.load(scale.at[item.expert, 0, outputs], plgpu.Layout.WGMMA.reduce(1), optimized=False)
        return total * lax.broadcast_in_dim(one, total.shape, (0,))
