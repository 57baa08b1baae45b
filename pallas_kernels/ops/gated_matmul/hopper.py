"""Multiply by gate and up and combine the two in one kernel on Hopper.

    out[t, f] = gate(x[t] @ weight[:, f], x[t] @ weight[:, F + f])

A dense product is a grouped product with one group: ring, tensor-core forms and gate are those of
`grouped_matmul/hopper/body.py`. The tiles of rows follow from the number of tokens (`Dense`), so
nothing is planned at run time. The products never leave the registers in bfloat16, which saves
8 T F bytes and a launch: XLA writes and reads them again.

A multiprocessor loads at most 64 bytes a cycle, so a third of them can read as fast as the memory of
an H200 delivers. A product with fewer items is left to XLA, which also splits the inputs.

Floor: bytes of the weights over the bandwidth, or 4 T I F operations.

Letters: T tokens, I inputs, F results, O = 2 F outputs.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic.interpret import Interpret
from pallas_kernels.mosaic.spec import CORES, refusal
from pallas_kernels.ops.grouped_matmul.hopper import matmul
from pallas_kernels.ops.grouped_matmul.hopper.body import Dense, Gate
from pallas_kernels.ops.grouped_matmul.hopper.matmul import Config, GroupedSpec

LEAST = 8  # tokens: the rows of the smallest copy; fewer would be padded by a launch of their own
MOST = 2048  # tokens: their activations stay in the level-2 cache (16 MB of 4,096 numbers) while all weights pass
NARROW = 128  # outputs of the narrowest tile: each of two warpgroups needs 64


def spec_of(tokens: int, inputs: int, outputs: int, dtype: object = jnp.bfloat16, cores: int = CORES) -> GroupedSpec:
    """Describe the product as one group."""
    return GroupedSpec(tokens, 1, inputs, outputs, dtype, cores=cores, gated=True)


def items(config: Config, spec: GroupedSpec) -> int:
    """Return the number of tiles, which blocks take in turn."""
    return Dense(spec.pairs).count(config.rows) * (spec.outputs // config.columns)


def heuristic(spec: GroupedSpec) -> Config:
    """Return a config expected to be good: wide tiles, unless they leave a quarter of the cores without any."""
    config = matmul.heuristic(spec)
    if config.columns == NARROW or 4 * items(config, spec) >= 3 * spec.cores:
        return config
    return matmul.deepest(replace(config, columns=NARROW, stages=1), spec)


def supports(spec: GroupedSpec) -> str | None:
    """Return None, or the reason why the product is left to XLA."""
    if not LEAST <= spec.pairs <= MOST:
        return f"it takes {LEAST} to {MOST} tokens, not {spec.pairs}"
    if (reason := refusal(heuristic, spec)) is not None:
        return reason
    few = items(heuristic(spec), spec)
    return f"{few} tiles are too few for {spec.cores} cores" if 3 * few < spec.cores else None


def gated_matmul(
    x: jax.Array,  # [T, I]
    weight: jax.Array,  # [I, O]: gates, then the values that they multiply
    *,
    gate: Gate,
    config: Config,
    interpret: Interpret = None,
) -> jax.Array:
    """Return gate(x @ left half, x @ right half), [T, F] in the dtype of x, both summed in float32."""
    (tokens, inputs), outputs = x.shape, weight.shape[1]
    if weight.shape != (inputs, outputs) or weight.dtype != x.dtype:
        raise ValueError(f"{x.dtype}{x.shape} and {weight.dtype}{weight.shape} do not match")
    spec = spec_of(tokens, inputs, outputs, x.dtype)
    config.validate(spec)
    tiles = Dense(tokens)
    loaded = config.rows if config.swapped else config.rows // config.consumers  # by one copy, at most
    rows = Dense(tokens).count(loaded) * loaded
    run = matmul.kernel_of(
        spec, config, tiles, tiles.count(config.rows), rows, out_dtype=x.dtype, gate=gate, interpret=interpret
    )
    return run(jnp.pad(x, ((0, rows - tokens), (0, 0))), weight[None])[:tokens]
