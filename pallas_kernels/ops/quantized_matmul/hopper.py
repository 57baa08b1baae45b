"""Multiply by 8-bit weights on Hopper, for the few tokens of decode; bound by reading the weights once.

    out[t, o] = sum_b scale[b, o] sum_{i in block b} x[t, i] w[i, o]

The operands are swapped: outputs are the rows of the tensor core's product (at least 64) and tokens
its columns (at least 8). Outputs are cut into strips of COLUMNS. The steps of all strips along I,
one strip after the other, are cut into equal shares, one per worker, so one strip may be computed
by several blocks. Their float32 sums are added by XLA, in the same small fusion that scales per
channel, transposes and rounds. Floor: one byte per weight over the bandwidth.

A block runs the items of one worker for one group of N tokens. Tiles of weights and activations
along I pass through a ring of `stages` slots by TMA; each of two consumer warpgroups widens 64
outputs of a tile, exactly, into shared memory, and multiplies by them (mosaic/quantized_tile.py).

Letters: T tokens, I contracted dimension, O outputs, n blocks of I with their own scales (1: per
channel), N tokens of a product, W items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.compat import plgpu
from pallas_kernels.mosaic.interpret import Interpret
from pallas_kernels.mosaic.memory import tiled
from pallas_kernels.mosaic.quantized_tile import COLUMNS, CONSUMERS, QUANTIZED, ROWS, Ring, Tile, bring, held, summed
from pallas_kernels.mosaic.spec import CORES, SMEM, allowed, check_dtype, check_smem, refusal

MOST = 256  # tokens; above this, the arithmetic takes longer than widening the weights once in memory
PRODUCT = 128  # maximum tokens of a product: its sums and one scale block's fill the registers


@dataclass(frozen=True)
class QuantizedSpec:
    """The shape that a config is chosen for."""

    tokens: int  # T
    inputs: int  # I
    outputs: int  # O
    scales: int = 1  # n
    dtype: Any = jnp.bfloat16
    stored: Any = jnp.int8
    cores: int = CORES


@dataclass(frozen=True)
class Config:
    """The tile sizes and number of workers that one shape is computed with."""

    tokens: int = 64  # N
    depth: int = 128  # inputs of a tile
    stages: int = 5  # slots of the ring
    workers: int = CORES  # blocks per group of N tokens

    def validate(self, spec: QuantizedSpec) -> None:
        """Raise ValueError, naming the value, if this config cannot compute the spec."""
        check_dtype(spec)
        if jnp.dtype(spec.stored).name not in QUANTIZED:
            raise ValueError(f"{spec.stored=} must be one of {', '.join(QUANTIZED)}")
        if spec.outputs % COLUMNS:
            raise ValueError(f"{spec.outputs=} must be a multiple of {COLUMNS}")
        if self.depth not in (64, 128) or spec.inputs % (self.depth * spec.scales):
            raise ValueError(f"{self.depth=} must be 64 or 128 and divide {spec.inputs=} / {spec.scales=}")
        if self.tokens not in (8, 16, 32, 64, PRODUCT) or not 1 <= spec.tokens <= MOST:
            raise ValueError(f"{self.tokens=} must be 8, 16, 32, 64 or {PRODUCT}, and {spec.tokens=} 1 to {MOST}")
        if self.stages < 2 or self.workers < 1:  # the next tile is widened before this one is released
            raise ValueError(f"{self.stages=} must be at least 2, and {self.workers=} positive")
        check_smem(self, self.smem_bytes())

    def smem_bytes(self) -> int:
        """Return the shared memory of a block, including barriers and alignment."""
        return self.stages * self.depth * 2 * self.tokens + held(self.depth, self.stages) + 2048


def heuristic(spec: QuantizedSpec) -> Config:
    """Return a config expected to be good for the spec."""
    tokens = next((n for n in (8, 16, 32, 64) if spec.tokens <= n), PRODUCT)
    depth = 128 if spec.inputs % (128 * spec.scales) == 0 else 64
    config = Config(tokens, depth, 2, max(1, spec.cores // -(-spec.tokens // tokens)))
    fits = (replace(config, stages=stages) for stages in range(8, 1, -1))
    return next((deep for deep in fits if deep.smem_bytes() <= SMEM), config)


def candidates(spec: QuantizedSpec) -> Iterator[Config]:
    """Yield configs worth timing for the spec, the heuristic one first; the compile gate drops those that spill."""
    best = heuristic(spec)
    some = (replace(best, depth=depth, stages=stages) for depth, stages in product((64, 128), (2, 3, 4, 5, 6, 8, 12)))
    return allowed((best, *some), spec)


def supports(spec: QuantizedSpec) -> str | None:
    """Return None, or the reason why no config computes the spec."""
    return refusal(heuristic, spec)


@dataclass(frozen=True)
class StripWork:
    """The steps of all strips, one strip after the other, cut into equal shares; constants of the trace."""

    strips: int  # O / COLUMNS
    steps: int  # I / depth
    workers: int

    @cached_property
    def items(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The items in order, [W, 3]: strip, first step and number of steps."""
        total = self.strips * self.steps
        edges = {round(total * worker / self.workers) for worker in range(self.workers + 1)}
        edges |= set(range(0, total + 1, self.steps))
        cuts = np.array(sorted(edges), np.int32)
        return np.stack([cuts[:-1] // self.steps, cuts[:-1] % self.steps, np.diff(cuts)], axis=1)

    @cached_property
    def cuts(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Bounds of the workers' items, [workers + 1]: worker w runs items cuts[w] to cuts[w + 1] - 1."""
        total, begins = self.strips * self.steps, self.items[:, 0] * self.steps + self.items[:, 1]
        edges = [round(total * worker / self.workers) for worker in range(self.workers + 1)]
        return np.searchsorted(begins, edges).astype(np.int32)

    @cached_property
    def parts(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The items of each strip, [strips, most items of a strip], padded with W."""
        by = [np.flatnonzero(self.items[:, 0] == strip) for strip in range(self.strips)]
        table = np.full((self.strips, max(map(len, by))), len(self.items), np.int32)
        for row, own in zip(table, by, strict=True):
            row[: len(own)] = own
        return table


def quantized_matmul(
    x: jax.Array,  # [T, I]
    values: jax.Array,  # [I, O] int8 or float8_e4m3fn
    scale: jax.Array,  # [n, O] float32
    *,
    config: Config,
    interpret: Interpret = None,
) -> jax.Array:
    """Return x @ (values * scale), [T, O] in the dtype of x, summed in float32."""
    (tokens, inputs), outputs, scales = x.shape, values.shape[1], scale.shape[0]
    config.validate(QuantizedSpec(tokens, inputs, outputs, scales, x.dtype, values.dtype))
    if values.shape != (inputs, outputs) or scale.shape != (scales, outputs):
        raise ValueError(f"x {x.shape}, values {values.shape}, scale {scale.shape} must be [T, I], [I, O], [n, O]")
    work = StripWork(outputs // COLUMNS, inputs // config.depth, config.workers)
    groups = -(-tokens // config.tokens)
    every = inputs // scales // config.depth if scales > 1 else 0
    tile = Tile(config.depth, every, jnp.dtype(x.dtype), jnp.dtype(values.dtype), interpret)
    shape = QuantizedShape(config.tokens, config.stages, tile)
    run = compat.kernel(
        body(shape),
        out=jax.ShapeDtypeStruct((groups, len(work.items), COLUMNS, config.tokens), jnp.float32),
        scratch=shape.scratch(),
        # Tokens are the last, fastest axis, so blocks that read the same weights run side by side.
        grid=((GRID, config.workers), (TOKENS, groups)),
        threads=(ROLE, CONSUMERS + 1),
        interpret=interpret,
    )
    padded = jnp.pad(x, ((0, groups * config.tokens - tokens), (0, 0)))
    sums = run(padded, values, scale, jnp.asarray(work.items), jnp.asarray(work.cuts))
    whole = _added(sums, work)  # [groups, strips, COLUMNS, N]
    out = whole.transpose(0, 3, 1, 2).reshape(groups * config.tokens, outputs)[:tokens]
    return (out * scale if scales == 1 else out).astype(x.dtype)


def _added(sums: jax.Array, work: StripWork) -> jax.Array:
    """Add the items' sums [groups, W, COLUMNS, N] of each strip, in the order of the contraction."""
    whole = sums[:, work.parts[:, 0]]
    for column in work.parts.T[1:]:
        there = (column < len(work.items))[None, :, None, None]
        whole = whole + jnp.where(there, sums[:, np.minimum(column, len(work.items) - 1)], 0.0)
    return whole


GRID, TOKENS, ROLE = "worker", "tokens", "role"


@dataclass(frozen=True)
class QuantizedShape:
    """The static parameters of the kernel body."""

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
    """The kernel's arguments, results and scratch, in the order it receives them."""

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


def body(shape: QuantizedShape) -> Callable[..., None]:
    """Return the kernel over the grid GRID, TOKENS and the threads ROLE: consumers first, then the producer."""

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
            for slot in range(shape.stages):  # a block must not end before every arrival was waited for

                @pl.when(steps > slot)
                def _(slot: int = slot) -> None:
                    plgpu.barrier_wait(refs.free.at[slot])

    return run


def _each_item(refs: Refs, compute: Callable[[jax.Array, jax.Array], None]) -> jax.Array:
    """Call one(item, steps before it) for each item of this worker; return the worker's number of steps."""
    worker = lax.axis_index(GRID)

    def step(item: jax.Array, done: jax.Array) -> jax.Array:
        compute(item, done)
        after: jax.Array = done + refs.items[item, 2]
        return after

    steps: jax.Array = lax.fori_loop(refs.cuts[worker], refs.cuts[worker + 1], step, jnp.int32(0))
    return steps


def _produce(shape: QuantizedShape, refs: Refs, item: jax.Array, done: jax.Array) -> None:
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


def _consume(shape: QuantizedShape, refs: Refs, item: jax.Array, done: jax.Array, role: jax.Array) -> None:
    first, column = refs.items[item, 1], refs.items[item, 0] * COLUMNS + role * ROWS

    def scale_at(k: jax.Array) -> Any:
        return refs.scale.at[lax.div(first + k, jnp.int32(shape.tile.every)), pl.ds(column, ROWS)]

    ring = Ring(refs.narrow_s, refs.wide_s, refs.x_s, refs.full, refs.free, shape.stages, role, done)
    total = summed(shape.tile, ring, refs.items[item, 2], scale_at)
    refs.out[lax.axis_index(TOKENS), item, pl.ds(role * ROWS, ROWS)] = total
