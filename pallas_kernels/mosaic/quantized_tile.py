"""Tiles of 8-bit weights in shared memory: a warpgroup widens its 64 outputs of each, exactly, and multiplies by them.

The tensor core takes 8 bits only where what is summed over lies together, and weights do not lie so: they go through
registers into shared memory, wide (widen.py). Of that there are two buffers: the next tile is widened while the tensor
core works on this one. Operands are swapped: outputs are the rows of its product, 64 of which are the least it takes.

Letters: I what is summed over, N tokens of a product, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.compat import plgpu
from pallas_kernels.mosaic.interpret import Interpret, cast, fence, wgmma
from pallas_kernels.mosaic.memory import tiled
from pallas_kernels.mosaic.widen import widened

QUANTIZED = ("int8", "float8_e4m3fn")
CONSUMERS, ROWS = 2, 64
COLUMNS = CONSUMERS * ROWS  # outputs of a tile
BUFFERS = 2


@dataclass(frozen=True)
class Tile:
    """Everything static about tiles of `depth` of I and COLUMNS outputs."""

    depth: int
    every: int  # tiles that share a scale; 0: all do, and scaling is not done here
    dtype: Any  # of the products
    stored: Any  # of the weights
    interpret: Interpret

    def scratch(self, stages: int) -> list[Any]:
        """A ring of tiles as they come, and what they are widened to."""
        return [
            tiled((stages, CONSUMERS, self.depth, ROWS), self.stored),
            tiled((BUFFERS, CONSUMERS, self.depth, ROWS), self.dtype),
        ]


def held(depth: int, stages: int, size: int = 2) -> int:
    """Bytes of shared memory of such a scratch; `size`: of a widened weight."""
    return depth * COLUMNS * (stages + BUFFERS * size)


def bring(values: Any, where: tuple[Any, ...], column: jax.Array, narrow: Any, full: Any) -> None:
    """One tile, by CONSUMERS copies: values[*where, column:] -> narrow [CONSUMERS, depth, ROWS]."""
    for half in range(CONSUMERS):
        source = values.at[(*where, pl.ds(column + half * ROWS, ROWS))]
        plgpu.copy_gmem_to_smem(source, narrow.at[half], full)


@dataclass(frozen=True)
class Ring:
    """Refs of a ring of tiles, and where this warpgroup is in it."""

    narrow: Any  # [stages, CONSUMERS, depth, ROWS]
    wide: Any  # [BUFFERS, CONSUMERS, depth, ROWS]
    x: Any  # [stages, N, depth]
    full: Any  # barriers
    free: Any
    stages: int
    role: jax.Array  # of the consumers
    done: jax.Array  # tiles before

    def slot(self, k: jax.Array) -> jax.Array:
        return lax.rem(self.done + k, jnp.int32(self.stages))


def summed(tile: Tile, ring: Ring, steps: jax.Array | int, scale_at: Callable[[jax.Array], Any]) -> jax.Array:
    """[ROWS, N] float32: this warpgroup's outputs, summed over the next `steps` tiles, of which there is at least one.

    `scale_at(i)`: the ref [ROWS] of scale i from the first of these tiles on, where `tile.every`.
    """
    layout, tokens = plgpu.Layout.WGMMA, ring.x.shape[1]

    def prepare(k: jax.Array) -> None:
        plgpu.barrier_wait(ring.full.at[ring.slot(k)])
        _widen(tile, ring, k)
        plgpu.commit_smem()

    def step(k: jax.Array, total: jax.Array) -> jax.Array:
        scale = None
        if tile.every:  # on its way while the product is waited for
            scale = compat.load(scale_at(k), layout.reduce(1), optimized=False)

        def meanwhile() -> None:
            pl.when(k + 1 < steps)(partial(prepare, k + 1))

        wide = compat.transpose(ring.wide.at[lax.rem(k, jnp.int32(BUFFERS)), ring.role])
        x = ring.x.at[ring.slot(k)]
        fresh = wgmma(wide, x, transposed=True, meanwhile=meanwhile, interpret=tile.interpret)
        fence(tile.interpret)
        plgpu.barrier_arrive(ring.free.at[ring.slot(k)])
        return total + (fresh if scale is None else fresh * lax.broadcast_in_dim(scale, fresh.shape, (0,)))

    prepare(jnp.int32(0))
    zeros = cast(jnp.zeros((ROWS, tokens), jnp.float32), layout, tile.interpret)
    total: jax.Array = lax.fori_loop(0, steps, step, zeros)
    return total


def _widen(tile: Tile, ring: Ring, k: jax.Array) -> None:
    """This warpgroup's weights of a tile, in the dtype of the products."""
    wide = widened(ring.narrow.at[ring.slot(k), ring.role], tile.dtype, tile.interpret)
    ring.wide[lax.rem(k, jnp.int32(BUFFERS)), ring.role] = wide
