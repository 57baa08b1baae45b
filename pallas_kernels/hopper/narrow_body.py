"""What a block of a product with 8-bit weights does: one warpgroup brings tiles, two widen and multiply them.

A block does the items of one worker, for one group of tokens. Along what is summed over, tiles of weights and of
activations go through a ring of `stages` slots by TMA. Each consumer takes 64 of a tile's outputs through its
registers: the tensor core takes 8 bits only where what is summed over lies together, and weights do not lie so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat
from pallas_kernels.compat import plgpu
from pallas_kernels.interpret import Interpret, cast, fence, is_interpreting, wgmma

GRID, TOKENS, ROLE = "worker", "tokens", "role"
CONSUMERS, ROWS = 2, 64
COLUMNS = CONSUMERS * ROWS  # outputs of a strip


@dataclass(frozen=True)
class Shape:
    """Everything static that the body needs to know."""

    tokens: int  # N
    depth: int
    stages: int
    every: int  # steps that share a scale; 0: all do, and scaling is not done here
    dtype: Any  # of the products
    stored: Any  # of the weights
    interpret: Interpret

    def scratch(self) -> list[Any]:
        return [
            _tiled((self.stages, self.tokens, self.depth), self.dtype),
            _tiled((self.stages, CONSUMERS, self.depth, ROWS), self.stored),
            _tiled((CONSUMERS, self.depth, ROWS), self.dtype),
            plgpu.Barrier(num_arrivals=1 + CONSUMERS, num_barriers=self.stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=self.stages),
        ]


def _tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as TMA and the tensor cores like it: 8 rows of up to 128 bytes, swizzled."""
    size = jnp.dtype(dtype).itemsize
    width = min(128 // size, shape[-1])
    transforms = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * size)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


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
    wide_s: Any  # [CONSUMERS, depth, ROWS]
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
        slot, depth = lax.rem(done + k, jnp.int32(shape.stages)), pl.ds((first + k) * shape.depth, shape.depth)
        full = refs.full.at[slot]

        @pl.when(done + k >= shape.stages)
        def _() -> None:
            plgpu.barrier_wait(refs.free.at[slot])

        for half in range(CONSUMERS):
            source = refs.values.at[depth, pl.ds(strip * COLUMNS + half * ROWS, ROWS)]
            plgpu.copy_gmem_to_smem(source, refs.narrow_s.at[slot, half], full)
        plgpu.copy_gmem_to_smem(refs.x.at[pl.ds(token, shape.tokens), depth], refs.x_s.at[slot], full)

    lax.fori_loop(0, refs.items[item, 2], step, None)


def _consume(shape: Shape, refs: Refs, item: jax.Array, done: jax.Array, role: jax.Array) -> None:
    strip, first, layout = refs.items[item, 0], refs.items[item, 1], plgpu.Layout.WGMMA
    column = strip * COLUMNS + role * ROWS

    def step(k: jax.Array, total: jax.Array) -> jax.Array:
        slot = lax.rem(done + k, jnp.int32(shape.stages))
        scale = None
        if shape.every:  # on its way while the tile is waited for
            row = lax.div(first + k, jnp.int32(shape.every))
            scale = compat.load(refs.scale.at[row, pl.ds(column, ROWS)], layout.reduce(1), optimized=False)
        plgpu.barrier_wait(refs.full.at[slot])
        for begin in range(0, shape.depth, ROWS):
            _widen(shape, refs, slot, role, begin)
        plgpu.commit_smem()
        wide = compat.transpose(refs.wide_s.at[role])
        fresh = wgmma(
            wide, refs.x_s.at[slot], None if shape.every else total, transposed=True, interpret=shape.interpret
        )
        fence(shape.interpret)
        plgpu.barrier_arrive(refs.free.at[slot])
        return fresh if scale is None else total + fresh * lax.broadcast_in_dim(scale, fresh.shape, (0,))

    zeros = cast(jnp.zeros((ROWS, shape.tokens), jnp.float32), layout, shape.interpret)
    total = lax.fori_loop(0, refs.items[item, 2], step, zeros)
    refs.out[lax.axis_index(TOKENS), item, pl.ds(role * ROWS, ROWS)] = total


def _widen(shape: Shape, refs: Refs, slot: jax.Array, role: jax.Array, begin: int) -> None:
    """64 rows of this consumer's weights of a slot, in the dtype of the products; what 8 bits can say, 16 can."""
    here = refs.narrow_s.at[slot, role, pl.ds(begin, ROWS)]
    known = is_interpreting(shape.interpret)
    narrow = here[...] if known else compat.load(here, plgpu.Layout.WGMMA_UPCAST_2X)
    if shape.stored == jnp.float8_e4m3fn and shape.dtype != jnp.float16:
        narrow = narrow.astype(jnp.float16).astype(jnp.float32)  # the hardware widens it to no other type
    refs.wide_s[role, pl.ds(begin, ROWS)] = cast(narrow.astype(shape.dtype), plgpu.Layout.WGMMA, shape.interpret)
