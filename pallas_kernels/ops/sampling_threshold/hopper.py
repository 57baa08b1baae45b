"""Find top-k, top-p and min-p thresholds on Hopper, one block per row; see `search.py`.

Floor: the bytes of the logits over the bandwidth, once. Logits are float32. TMA requires a row to
start at a multiple of 16 bytes, so V is a multiple of 4.

A block is one warpgroup. What a sweep gathers stays in registers, spread over the lanes, and is
summed once at the end of the sweep. There is no producer warpgroup: a slot's next copy starts as
soon as its tile was read. Several blocks share a core, so one block's arithmetic overlaps another's
copies.

Letters: G rows, V vocabulary, L lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.compat import plgpu
from pallas_kernels.mosaic.interpret import Interpret
from pallas_kernels.mosaic.spec import check_smem, refusal
from pallas_kernels.ops.sampling_threshold.search import DEPTH, NOTHING, Found, Options, Seen, insert, search

WARPGROUP = 128


@dataclass(frozen=True)
class Config:
    """How a row is swept."""

    lanes: int = 512  # L
    tile: int = 2048  # logits per copy
    stages: int = 4

    def validate(self, vocab: int) -> None:
        """Raise ValueError, naming the value, if this config cannot sweep rows of `vocab` logits."""
        if vocab % 4:
            raise ValueError(f"{vocab=} must be a multiple of 4, so that rows start at multiples of 16 bytes")
        if self.lanes % WARPGROUP or self.lanes < WARPGROUP or self.tile % self.lanes:
            raise ValueError(f"{self.lanes=} must be a multiple of {WARPGROUP} and divide {self.tile=}")
        if vocab < self.tile:
            raise ValueError(f"{vocab=} must be at least {self.tile=}")
        if self.stages < 1:
            raise ValueError(f"{self.stages=} must be positive")
        check_smem(self, self.smem_bytes())

    def smem_bytes(self) -> int:
        """Return the shared memory of a block, including barriers and the scratch of reductions."""
        return 4 * self.stages * self.tile + 2048


def heuristic(vocab: int) -> Config:
    """Return a config expected to be good for rows of `vocab` logits."""
    fits = (Config(lanes, lanes * each) for lanes, each in ((512, 4), (128, 4), (128, 1)))
    return next((config for config in fits if config.tile <= vocab // 2), Config(128, 128))


def supports(vocab: int) -> str | None:
    """Return None, or the reason why no config sweeps rows of `vocab` logits."""
    return refusal(heuristic, vocab)


def thresholds(x: jax.Array, options: Options, *, config: Config, interpret: Interpret = None) -> Found:
    """Return the lowest logit that each row of x [G, V] keeps, and its number of sweeps, [G]; see `search.py`."""
    rows, vocab = x.shape
    config.validate(vocab)
    if x.dtype != jnp.float32 or any(option.shape != (rows,) or option.dtype != jnp.float32 for option in options):
        raise ValueError(f"x {x.dtype} {x.shape} must be float32, and options float32 [{rows}], not {options}")
    shape = ThresholdShape(vocab, config.lanes, config.tile, config.stages)
    run = compat.kernel(
        body(shape),
        out=(jax.ShapeDtypeStruct((rows,), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)),
        scratch=shape.scratch(),
        grid=((ROW, rows),),
        threads=("warpgroup", 1),
        interpret=interpret,
    )
    return Found(*run(x, *options))


ROW = "row"


@dataclass(frozen=True)
class ThresholdShape:
    """The static parameters of the kernel body."""

    vocab: int  # V
    lanes: int  # L
    tile: int  # logits; a multiple of the lanes
    stages: int

    def scratch(self) -> list[Any]:
        return [
            plgpu.SMEM((self.stages, self.tile), jnp.float32),
            plgpu.Barrier(num_barriers=self.stages),
        ]

    @property
    def layout(self) -> Any:
        """The lanes' place in registers. Left to the compiler, its search takes twenty times as long."""
        return plgpu.Layout.WG_STRIDED((self.lanes,), self.lanes // WARPGROUP)

    @property
    def tiles(self) -> int:
        return -(-self.vocab // self.tile)


class Refs(NamedTuple):
    """The kernel's arguments, results and scratch, in the order it receives them."""

    x: Any  # [G, V] float32
    rate: Any  # [G] float32; this and the next three are `Options`
    least: Any
    top_k: Any
    top_p: Any
    threshold: Any  # [G] float32
    sweeps: Any  # [G] int32
    ring: Any  # [stages, tile]
    full: Any  # barriers


def body(shape: ThresholdShape) -> Callable[..., None]:
    """Return the kernel over the grid ROW; rows that ask for no threshold are not read."""

    def run(*arrays: Any) -> None:
        refs = Refs(*arrays)
        row = lax.axis_index(ROW)
        options = Options(*(option[row] for option in refs[1:5]))
        cuts = (options.top_k > 0) | (options.top_p < 1) | (options.least > NOTHING)

        @pl.when(cuts)
        def _() -> None:
            result = _found(shape, refs, row, options)
            refs.threshold[row] = result.threshold
            refs.sweeps[row] = result.sweeps

        @pl.when(jnp.logical_not(cuts))
        def _() -> None:
            refs.threshold[row] = jnp.float32(NOTHING)
            refs.sweeps[row] = jnp.int32(0)

    return run


def _found(shape: ThresholdShape, refs: Refs, row: jax.Array, options: Options) -> Found:
    zeros = jnp.zeros((shape.lanes,), jnp.float32)
    nothing = (jnp.full((shape.lanes,), NOTHING, jnp.float32),) * DEPTH

    def first(parts: list[jax.Array], state: Any) -> Any:
        """Sum weights relative to the running maximum of each lane, since the row's top is not known yet."""
        caught, mass = state
        before = caught[0]
        for part in parts:
            caught = insert(caught, part)
        mass = mass * jnp.exp2((before - caught[0]) * options.rate)
        for part in parts:
            mass = mass + jnp.exp2((part - caught[0]) * options.rate)
        return caught, mass

    caught, mass = _each_tile(shape, refs, row, first, (nothing, zeros))
    top = jnp.max(caught[0])
    total = jnp.sum(mass * jnp.exp2((caught[0] - top) * options.rate))

    def sweep(limit: jax.Array, marks: Sequence[jax.Array], rate: jax.Array) -> tuple[Seen, list[jax.Array]]:
        thresholds = (limit, *marks)

        def again(parts: list[jax.Array], state: Any) -> Any:
            caught, sums = state
            for part in parts:
                # With rate 0 the weight of -inf is NaN, but -inf is below all marks and never summed.
                weight = jnp.exp2((part - top) * rate)
                sums = [
                    total + jnp.where(part >= mark, weight, 0.0) for total, mark in zip(sums, thresholds, strict=True)
                ]
                caught = insert(caught, jnp.where(part >= thresholds[0], NOTHING, part))
            return caught, sums

        caught, sums = _each_tile(shape, refs, row, again, (nothing, [zeros] * len(thresholds)))
        above, *kept = [jnp.sum(total) for total in sums]
        return Seen(limit, above, caught), kept

    return search(top, total, caught, options, sweep, shape.vocab)


def _each_tile(
    shape: ThresholdShape, refs: Refs, row: jax.Array, fold: Callable[[list[jax.Array], Any], Any], start: Any
) -> Any:
    """Fold one(parts of a tile, state) over a row's tiles; each part has one logit per lane."""
    stages, tiles = min(shape.stages, shape.tiles), shape.tiles

    def copy(tile: Any, slot: Any) -> None:
        # The last tile starts early enough to end with the row; logits it repeats are masked below.
        begin = jnp.minimum(tile * shape.tile, shape.vocab - shape.tile)
        source = refs.x.at[row, pl.ds(begin, shape.tile)]
        compat.copy_row(source, refs.ring.at[slot], refs.full.at[slot])

    def read(slot: Any) -> list[jax.Array]:
        plgpu.barrier_wait(refs.full.at[slot])
        each = range(0, shape.tile, shape.lanes)
        return [compat.load(refs.ring.at[slot, pl.ds(at, shape.lanes)], shape.layout) for at in each]

    for tile in range(stages):
        copy(jnp.int32(tile), tile)

    def step(tile: jax.Array, state: Any) -> Any:
        slot = lax.rem(tile, jnp.int32(stages))
        parts = read(slot)
        plgpu.commit_smem()

        @pl.when(tile + stages < tiles)
        def _() -> None:
            copy(tile + stages, slot)

        return fold(parts, state)

    whole = shape.vocab // shape.tile
    state = lax.fori_loop(0, whole, step, start)
    if whole == tiles:
        return state
    parts, twice = read((tiles - 1) % stages), tiles * shape.tile - shape.vocab
    plgpu.commit_smem()
    lane = lax.broadcasted_iota(jnp.int32, (shape.lanes,), 0)
    hidden = [jnp.where(lane + n * shape.lanes >= twice, part, NOTHING) for n, part in enumerate(parts)]
    return fold(hidden, state)
