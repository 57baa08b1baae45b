"""Check products with 8-bit weights against float64: in the interpreter, or on a GPU if there is one."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ops.quantized_matmul.hopper import (
    Config,
    QuantizedSpec,
    quantized_matmul,
)
from tests.support.kernels.interpreted import haste, seed, without_races
from tests.support.kernels.reference import doubles, error

LARGEST_ERROR = {"bfloat16": 4e-3, "float16": 6e-4}  # relative, over the whole output
SMALL = Config(tokens=8, depth=64, stages=2, workers=2)


def check(spec: QuantizedSpec, config: Config) -> None:
    random = np.random.default_rng(seed(5))
    x = jnp.asarray(random.standard_normal((spec.tokens, spec.inputs)), spec.dtype)
    values = random.standard_normal((spec.inputs, spec.outputs)) * (40 if spec.stored == jnp.int8 else 1)
    values = jnp.asarray(np.clip(np.rint(values), -127, 127) if spec.stored == jnp.int8 else values, spec.stored)
    scale = jnp.asarray(random.uniform(0.01, 0.1, (spec.scales, spec.outputs)), jnp.float32)

    # One program, compiled without optimization, because compiling takes most of the time.
    @partial(jax.jit, compiler_options=haste())
    def product(*arrays: jax.Array) -> jax.Array:
        return quantized_matmul(*arrays, config=config, interpret=interpret)

    with without_races() as interpret:
        got = jax.block_until_ready(product(x, values, scale))
    weight = doubles(values) * np.repeat(doubles(scale), spec.inputs // spec.scales, axis=0)
    assert got.dtype == spec.dtype
    assert error(got, doubles(x) @ weight) < LARGEST_ERROR[jnp.dtype(spec.dtype).name]
