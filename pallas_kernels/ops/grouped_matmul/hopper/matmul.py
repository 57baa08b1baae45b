"""Compute the products of a mixture of experts on Hopper: each row with the weights of its own expert.

    out[r] = x[r] @ weight[owner[r]]

Rows are sorted by expert (plan.py), and only experts with rows are read. The kernel is persistent
and warp-specialized, with two forms. For prefill, rows are the left operand of the tensor core, in
tiles of at least 64. For decode, the operands are swapped: outputs are the rows of the product and
tokens its columns, of which 8 suffice; while an expert's rows fit one tile, its weights are
streamed once. Both operands are in shared memory in both forms, because ptxas before 13.3 may
miscompile a left operand in registers.

Weights may have 8 bits, with n scales of each output along I:

    out[r, o] = sum_b scale[owner[r], b, o] sum_{i in block b} x[r, i] weight[owner[r], i, o]

They are widened inside the kernel, exactly, and sums are scaled in float32. Operands are then
swapped for prefill too.

Floor: bytes of the experts with rows over the bandwidth (277 us for a layer of Qwen3-30B-A3B and 64
tokens), or 2 R I O operations (391 us for 4,096 tokens).

Letters: T tokens, Q pairs of a token and an expert, R rows, X experts, I contracted dimension, O
outputs, n blocks of I with their own scales (1: per channel).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, product
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.interpret import Interpret
from pallas_kernels.mosaic.quantized_tile import COLUMNS, CONSUMERS, QUANTIZED, Tile, held
from pallas_kernels.mosaic.spec import CORES, SMEM, allowed, check_dtype, check_smem, refusal
from pallas_kernels.ops.grouped_matmul.hopper.body import (
    ALIGN,
    DEPTH,
    GRID,
    ROLE,
    WIDE,
    Gate,
    GroupedShape,
    QuantizedWeights,
    Routed,
    Tiles,
    Whole,
    body,
)
from pallas_kernels.ops.grouped_matmul.plan import Groups, plan_experts

ROWS = 64  # minimum rows of a tensor-core product


@dataclass(frozen=True)
class GroupedSpec:
    """The shape that a config is chosen for; X, I and O are those of one shard."""

    pairs: int  # Q
    experts: int  # X
    width: int  # I
    outputs: int  # O
    dtype: Any = jnp.bfloat16
    stored: Any = None  # dtype of 8-bit weights, one of QUANTIZED; None: weights are `dtype`
    scales: int = 1  # n, for 8-bit weights
    cores: int = CORES
    gated: bool = False  # O is twice the results: gates, and the values that they multiply

    @property
    def quantized(self) -> bool:
        return self.stored is not None


def spec_of(
    pairs: int, x: jax.Array, weight: jax.Array, scale: jax.Array | None, gated: bool, cores: int = CORES
) -> GroupedSpec:
    """Describe the product of x [R, I] and weight [X, I, O], of 8 bits if it has a scale [X, n, O]."""
    stored, scales = (None, 1) if scale is None else (weight.dtype, scale.shape[1])
    experts, _, outputs = weight.shape
    return GroupedSpec(pairs, experts, x.shape[1], outputs, x.dtype, stored, scales, cores, gated)


@dataclass(frozen=True)
class Config:
    """The tile sizes and form that one shape is computed with."""

    rows: int = 128  # rows of a tile
    columns: int = 256  # outputs of a tile
    stages: int = 4  # slots of the ring
    consumers: int = 2  # warpgroups that multiply
    swapped: bool = False  # outputs are the rows of the tensor core's product, tokens its columns
    blocks: int = CORES

    depth: int = DEPTH  # inputs of a tile; with 8-bit weights possibly twice as many

    def validate(self, spec: GroupedSpec) -> None:
        """Raise ValueError, naming the value, if this config cannot compute the spec."""
        check_dtype(spec)
        if self.consumers not in (1, 2) or min(self.stages, self.blocks) < 1:
            raise ValueError(f"{self.consumers=} must be 1 or 2, {self.stages=} and {self.blocks=} positive")
        if spec.quantized:
            self._validate_narrow(spec)
        else:
            self._validate_whole(spec)
        if self.swapped and (self.rows not in (8, 16, 32, 64, 128) or self.columns % (ROWS * self.consumers)):
            raise ValueError(
                f"if swapped, {self.rows=} must be 8, 16, 32, 64 or 128, and {self.columns=} a multiple of {ROWS} for "
                f"each of {self.consumers=}"
            )
        if spec.gated and (
            self.columns not in (128, 256) or self.consumers != 2 or self.columns > 128 * (2 - self.swapped)
        ):
            raise ValueError(
                f"with a gate, {self.columns=} must be 128, or 256 if not swapped, and {self.consumers=} must be 2"
            )
        check_smem(self, self.smem_bytes(spec))

    def _validate_whole(self, spec: GroupedSpec) -> None:
        if spec.width % DEPTH or spec.outputs % WIDE:
            raise ValueError(f"{spec.width=} and {spec.outputs=} must be multiples of {DEPTH} and {WIDE}")
        if self.depth != DEPTH:
            raise ValueError(f"{self.depth=} must be {DEPTH}")
        if self.columns not in (64, 128, 192, 256) or spec.outputs % self.columns:
            raise ValueError(f"{self.columns=} must be 64, 128, 192 or 256 and divide {spec.outputs=}")
        if not self.swapped and self.rows not in (ROWS * self.consumers, 2 * ROWS * self.consumers):
            raise ValueError(f"{self.rows=} must be {ROWS} or {2 * ROWS} for each of {self.consumers=}")
        if (sums := self.rows * self.columns // self.consumers) > ROWS * 256:
            raise ValueError(f"{self} has {sums} sums per warpgroup; the limit is {ROWS * 256}")

    def _validate_narrow(self, spec: GroupedSpec) -> None:
        if jnp.dtype(spec.stored).name not in QUANTIZED:
            raise ValueError(f"{spec.stored=} must be one of {', '.join(QUANTIZED)}")
        if spec.outputs % COLUMNS:
            raise ValueError(f"{spec.outputs=} must be a multiple of {COLUMNS} for 8-bit weights")
        if self.depth not in (DEPTH, 2 * DEPTH) or spec.width % (self.depth * spec.scales):
            raise ValueError(f"{self.depth=} must be {DEPTH} or {2 * DEPTH} and divide {spec.width=} / {spec.scales=}")
        if not self.swapped or (self.columns, self.consumers) != (COLUMNS, CONSUMERS) or self.stages < 2:
            raise ValueError(
                f"{self} must be swapped for 8-bit weights, with columns={COLUMNS}, consumers={CONSUMERS} "
                "and at least 2 stages"
            )

    def smem_bytes(self, spec: GroupedSpec) -> int:
        """Return the shared memory of a block, including barriers and alignment; results take at most 4 bytes."""
        stored = self.rows * (self.consumers if self.swapped else 1)
        quantized = held(self.depth, self.stages)
        weights = quantized if spec.quantized else self.stages * self.depth * self.columns * 2
        passed = self.rows * ROWS * 4 if spec.gated and self.swapped else 0
        return self.stages * self.depth * self.rows * 2 + weights + stored * WIDE * 4 + passed + 2048


def plan(chosen: jax.Array, experts: int, tile: int | None = None) -> Groups:
    """Plan the work for chosen [Q], shared by both products of a layer; `tile` None: as `heuristic` chooses."""
    tile = tile or tile_of(len(chosen), experts)
    return plan_experts(chosen, experts=experts, tile=tile, align=ALIGN)


def tile_of(pairs: int, experts: int) -> int:
    """Return the rows of a tile: 128, or if experts have few rows, eight times their mean, at most 64.

    Up to 64 rows, `heuristic` swaps the operands.
    """
    mean = -(-pairs // experts)
    if mean > 32:
        return 2 * ROWS
    return next(rows for rows in (8, 16, 32, 64) if rows >= min(ROWS, 8 * mean, pairs))


def heuristic(spec: GroupedSpec) -> Config:
    """Return a config expected to be good for the work of `plan`."""
    rows = tile_of(spec.pairs, spec.experts)
    if spec.quantized:
        # A tile twice as deep halves the number of waits, if there is room for several.
        depth = gcd(spec.width // spec.scales, 2 * DEPTH) if rows <= ROWS else DEPTH
        config = Config(rows, COLUMNS, 2, CONSUMERS, True, spec.cores, depth)
        return deepest(config, spec)
    swapped = rows <= ROWS
    # With swapped operands, wide strips would leave some blocks idle: only experts with tokens have tiles.
    widths = (128,) if swapped else (256, 128) if spec.gated else (256, 192, 128)
    columns = next((width for width in widths if spec.outputs % width == 0), 64)
    consumers = 1 if swapped and columns == ROWS else 2
    return deepest(Config(rows, columns, 1, consumers, swapped, spec.cores), spec)


def deepest(config: Config, spec: GroupedSpec) -> Config:
    """Return the config with the most stages that fit into shared memory, at least those that it has."""
    most = 8 if spec.quantized else 12 if config.swapped else 6
    deep = (replace(config, stages=count) for count in range(most, config.stages, -1))
    return next((each for each in deep if each.smem_bytes(spec) <= SMEM), config)


def supports(spec: GroupedSpec) -> str | None:
    """Return None, or the reason why no config computes the spec."""
    return refusal(heuristic, *(replace(spec, pairs=pairs) for pairs in (1, 2 * ROWS * spec.experts)))  # both forms


def candidates(spec: GroupedSpec) -> Iterator[Config]:
    """Yield configs worth timing for the spec, the heuristic one first; the compile gate drops those that spill."""
    stages, depths = (2, 3, 4, 6, 8, 12), (DEPTH, 2 * DEPTH) if spec.quantized else (DEPTH,)
    sizes = product((True, False), (8, 16, 32, 64, 128, 256), (64, 128, 192, 256), stages, (1, 2), depths)
    some = (
        Config(rows, columns, stages, consumers, swapped, spec.cores, depth)
        for swapped, rows, columns, stages, consumers, depth in sizes
    )
    return allowed(chain([heuristic(spec)], some), spec)


def grouped_matmul(
    x: jax.Array,  # [R, I], rows ordered by `work`
    weight: jax.Array,  # [X, I, O]
    work: Groups,
    *,
    scale: jax.Array | None = None,  # [X, n, O] float32, for 8-bit weights
    out_dtype: Any = None,
    gate: Gate | None = None,
    config: Config,
    interpret: Interpret = None,
) -> jax.Array:
    """Return the product, [R, O] of `out_dtype`, summed in float32; padding rows hold arbitrary values.

    `work` is `plan(chosen, X, config.rows)`. With `gate`, return gate(left half of the product, right
    half), [R, O / 2].
    """
    (rows, width), (experts, _, outputs) = x.shape, weight.shape
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    spec = spec_of(rows, x, weight, scale, gate is not None)
    config.validate(spec)
    fits = weight.dtype == x.dtype if scale is None else scale.shape == (experts, spec.scales, outputs)
    if not fits or weight.shape[1] != width or rows != len(work.source):
        scales = "" if scale is None else f", scales {scale.shape}"
        raise ValueError(
            f"{x.dtype}{x.shape}, {weight.dtype}{weight.shape}{scales} and {len(work.source)} rows do not match"
        )
    run = kernel_of(spec, config, Routed(), len(work.expert), rows, out_dtype=out_dtype, gate=gate, interpret=interpret)
    held_by = (weight,) if scale is None else (weight, scale)
    return run(x, work.expert, work.begin, work.length, work.used, *held_by)


def kernel_of(
    spec: GroupedSpec,
    config: Config,
    tiles: Tiles,
    most: int,
    rows: int,
    *,
    out_dtype: Any,
    gate: Gate | None,
    interpret: Interpret,
) -> Callable[..., jax.Array]:
    """Return the kernel of x [rows, I], the arrays of `tiles`, which are `most` at most, and the weights' arrays.

    It returns [rows, O], or with a gate [rows, O / 2].
    """
    shape = GroupedShape(
        rows=config.rows,
        columns=config.columns,
        stages=config.stages,
        consumers=config.consumers,
        swapped=config.swapped,
        blocks=min(config.blocks, most * (spec.outputs // config.columns)),
        strips=spec.outputs // config.columns,
        outputs=spec.outputs,
        depth=config.depth,
        steps=spec.width // config.depth,
        dtype=spec.dtype,
        out_dtype=out_dtype,
        tiles=tiles,
        weights=_weights(spec, config, interpret),
        interpret=interpret,
        gate=gate,
    )
    return compat.kernel(
        body(shape),
        out=jax.ShapeDtypeStruct((rows, shape.apart), out_dtype),
        scratch=shape.scratch(),
        grid=((GRID, shape.blocks),),
        threads=(ROLE, config.consumers + 1),
        interpret=interpret,
    )


def _weights(spec: GroupedSpec, config: Config, interpret: Interpret) -> Whole | QuantizedWeights:
    if not spec.quantized:
        return Whole(2 if spec.gated else 1)
    every = spec.width // spec.scales // config.depth if spec.scales > 1 else 0
    return QuantizedWeights(Tile(config.depth, every, jnp.dtype(spec.dtype), jnp.dtype(spec.stored), interpret))
