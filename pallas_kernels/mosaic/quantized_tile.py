"""Multiply by tiles of 8-bit weights: each warpgroup widens its own 64 outputs of a tile, exactly, in shared memory.

For 8-bit operands the tensor core requires the contracted dimension to be contiguous, which in
weights it is not. So weights go through registers back into shared memory, widened (widen.py). The
wide tile has two buffers: the next tile is widened while the tensor core works on the current one.
Operands are swapped: outputs are the rows of the product, of which the tensor core needs at least
64.

Letters: I contracted dimension, N tokens of a product, O outputs.
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
from pallas_kernels.mosaic.interpret import Interpret, cast, fence, wgmma_while
from pallas_kernels.mosaic.memory import tiled
from pallas_kernels.mosaic.widen import widened

QUANTIZED = ("int8", "float8_e4m3fn")
CONSUMERS, ROWS = 2, 64
COLUMNS = CONSUMERS * ROWS  # outputs per tile
BUFFERS = 2


@dataclass(frozen=True)
class Tile:
    """The static parameters of tiles of `depth` inputs (of I) and COLUMNS outputs."""

    depth: int
    every: int  # consecutive tiles that share a scale; 0: one scale for all, applied elsewhere
    dtype: Any  # of the widened weights and activations
    stored: Any  # of the stored weights
    interpret: Interpret

    def scratch(self, stages: int) -> list[Any]:
        """Return the scratch buffers: the ring of 8-bit tiles, and the buffers they are widened into."""
        return [
            tiled((stages, CONSUMERS, self.depth, ROWS), self.stored),
            tiled((BUFFERS, CONSUMERS, self.depth, ROWS), self.dtype),
        ]


def held(depth: int, stages: int) -> int:
    """Return the bytes of shared memory that `Tile.scratch` takes; a widened weight has two."""
    return depth * COLUMNS * (stages + BUFFERS * 2)


def bring(values: Any, where: tuple[Any, ...], column: jax.Array, narrow: Any, full: Any, apart: int = ROWS) -> None:
    """Copy one tile to narrow [CONSUMERS, depth, ROWS]: values[*where, column + i * apart :] for each consumer i."""
    for half in range(CONSUMERS):
        source = values.at[(*where, pl.ds(column + half * apart, ROWS))]
        plgpu.copy_gmem_to_smem(source, narrow.at[half], full)


@dataclass(frozen=True)
class Ring:
    """The refs of a ring of tiles, and this warpgroup's position in it."""

    narrow: Any  # [stages, CONSUMERS, depth, ROWS]
    wide: Any  # [BUFFERS, CONSUMERS, depth, ROWS]
    x: Any  # [stages, N, depth]
    full: Any  # barriers
    free: Any
    stages: int
    role: jax.Array  # index of this consumer
    done: jax.Array  # tiles consumed before

    def slot(self, k: jax.Array) -> jax.Array:
        return lax.rem(self.done + k, jnp.int32(self.stages))


def summed(tile: Tile, ring: Ring, steps: jax.Array | int, scale_at: Callable[[jax.Array], Any]) -> jax.Array:
    """Return this warpgroup's outputs, [ROWS, N] float32, summed over the next `steps` >= 1 tiles.

    `scale_at(i)`: the ref [ROWS] of the scale of tile i, counted from the first of these tiles;
    used if `tile.every` > 0.
    """
    layout, tokens = plgpu.Layout.WGMMA, ring.x.shape[1]

    def prepare(k: jax.Array) -> None:
        plgpu.barrier_wait(ring.full.at[ring.slot(k)])
        _widen(tile, ring, k)
        plgpu.commit_smem()

    def step(k: jax.Array, total: jax.Array) -> jax.Array:
        scale = None
        if tile.every:  # loaded while the product runs
            scale = compat.load(scale_at(k), layout.reduce(1), optimized=False)

        def meanwhile() -> None:
            pl.when(k + 1 < steps)(partial(prepare, k + 1))

        wide = compat.transpose(ring.wide.at[lax.rem(k, jnp.int32(BUFFERS)), ring.role])
        x = ring.x.at[ring.slot(k)]
        fresh, _ = wgmma_while(wide, x, meanwhile, transposed=True, interpret=tile.interpret)
        fence(tile.interpret)
        plgpu.barrier_arrive(ring.free.at[ring.slot(k)])
        return total + (fresh if scale is None else fresh * lax.broadcast_in_dim(scale, fresh.shape, (0,)))

    prepare(jnp.int32(0))
    zeros = cast(jnp.zeros((ROWS, tokens), jnp.float32), layout, tile.interpret)
    total: jax.Array = lax.fori_loop(0, steps, step, zeros)
    return total


def _widen(tile: Tile, ring: Ring, k: jax.Array) -> None:
    """Widen this warpgroup's half of tile k into its buffer."""
    wide = widened(ring.narrow.at[ring.slot(k), ring.role], tile.dtype, tile.interpret)
    ring.wide[lax.rem(k, jnp.int32(BUFFERS)), ring.role] = wide
