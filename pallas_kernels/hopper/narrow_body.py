"""What a block of a product with 8-bit weights does: one warpgroup brings tiles, two widen and multiply them.

A block does the items of one worker, for one group of tokens. Along what is summed over, tiles of weights and of
activations go through a ring of `stages` slots by TMA. Each consumer has 64 of a tile's outputs (narrow_tile.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import plgpu
from pallas_kernels.hopper.memory import tiled
from pallas_kernels.hopper.narrow_tile import COLUMNS, CONSUMERS, ROWS, Ring, Tile, bring, summed

GRID, TOKENS, ROLE = "worker", "tokens", "role"


@dataclass(frozen=True)
class Shape:
    """Everything static that the body needs to know."""

    tokens: int  # N
    stages: int
    tile: Tile

    def scratch(self) -> list[Any]:
        return [
            tiled((self.stages, self.tokens, self.tile.depth), self.tile.dtype),
            *self.tile.scratch(self.stages),
            plgpu.Barrier(num_arrivals=1 + CONSUMERS, num_barriers=self.stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=self.stages),
        ]


class Refs(NamedTuple):
    """Arguments, results and scratch, in the order in which the kernel gets them."""

    x: Any  # [groups * N, I]
    values: Any  # [I, O]
    scale: Any  # [n, O]
    items: Any  # [W, 3] strip, first step, steps
    cuts: Any  # [workers + 1]
    out: Any  # [groups, W, COLUMNS, N] float32
    x_s: Any  # [stages, N, depth]
    narrow_s: Any  # [stages, CONSUMERS, depth, ROWS]
    wide_s: Any  # [BUFFERS, CONSUMERS, depth, ROWS]
    full: Any  # barriers
    free: Any


def body(shape: Shape) -> Callable[..., None]:
    """The kernel over the grid GRID, TOKENS, threads ROLE: consumers first, then the producer."""

    def run(*arrays: Any) -> None:
        refs = Refs(*arrays)
        role = lax.axis_index(ROLE)

        @pl.when(role < CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            _each_item(refs, lambda item, done: _consume(shape, refs, item, done, role))

        @pl.when(role == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")
            steps = _each_item(refs, lambda item, done: _produce(shape, refs, item, done))
            for slot in range(shape.stages):  # a block must not end before every arrival has been waited for

                @pl.when(steps > slot)
                def _(slot: int = slot) -> None:
                    plgpu.barrier_wait(refs.free.at[slot])

    return run


def _each_item(refs: Refs, one: Callable[[jax.Array, jax.Array], None]) -> jax.Array:
    """one(item, steps before it) for each item of this worker; how many steps they were."""
    worker = lax.axis_index(GRID)

    def step(item: jax.Array, done: jax.Array) -> jax.Array:
        one(item, done)
        after: jax.Array = done + refs.items[item, 2]
        return after

    steps: jax.Array = lax.fori_loop(refs.cuts[worker], refs.cuts[worker + 1], step, jnp.int32(0))
    return steps


def _produce(shape: Shape, refs: Refs, item: jax.Array, done: jax.Array) -> None:
    strip, first, token = refs.items[item, 0], refs.items[item, 1], lax.axis_index(TOKENS) * shape.tokens

    def step(k: jax.Array, nothing: None) -> None:
        slot = lax.rem(done + k, jnp.int32(shape.stages))
        depth = pl.ds((first + k) * shape.tile.depth, shape.tile.depth)
        full = refs.full.at[slot]

        @pl.when(done + k >= shape.stages)
        def _() -> None:
            plgpu.barrier_wait(refs.free.at[slot])

        bring(refs.values, (depth,), strip * COLUMNS, refs.narrow_s.at[slot], full)
        plgpu.copy_gmem_to_smem(refs.x.at[pl.ds(token, shape.tokens), depth], refs.x_s.at[slot], full)

    lax.fori_loop(0, refs.items[item, 2], step, None)


def _consume(shape: Shape, refs: Refs, item: jax.Array, done: jax.Array, role: jax.Array) -> None:
    first, column = refs.items[item, 1], refs.items[item, 0] * COLUMNS + role * ROWS

    def scale_at(k: jax.Array) -> Any:
        return refs.scale.at[lax.div(first + k, jnp.int32(shape.tile.every)), pl.ds(column, ROWS)]

    ring = Ring(refs.narrow_s, refs.wide_s, refs.x_s, refs.full, refs.free, shape.stages, role, done)
    total = summed(shape.tile, ring, refs.items[item, 2], scale_at)
    refs.out[lax.axis_index(TOKENS), item, pl.ds(role * ROWS, ROWS)] = total
