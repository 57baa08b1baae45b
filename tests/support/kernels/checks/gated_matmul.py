"""Check gated products of dense feed-forwards against float64: in the interpreter, or on a GPU if there is one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pallas_kernels.ops.gated_matmul.api import GATES
from pallas_kernels.ops.gated_matmul.hopper import gated_matmul, heuristic, spec_of
from pallas_kernels.ops.grouped_matmul.hopper.matmul import Config
from tests.support.kernels.interpreted import cores, haste, seed, without_races
from tests.support.kernels.reference import doubles, error

LARGEST_ERROR = {"bfloat16": 4e-3, "float16": 6e-4}  # relative, over the whole output


def chosen(tokens: int, inputs: int, results: int, dtype: Any = jnp.bfloat16) -> Config:
    """Return the config that an engine chooses; in the interpreter with few blocks, so that each has several tiles."""
    config = heuristic(spec_of(tokens, inputs, 2 * results, dtype))
    return replace(config, blocks=min(config.blocks, cores()))


def formula(x: Any, weight: Any, activation: str) -> npt.NDArray[np.float64]:
    """Return the activation of the first half of the product times the second half."""
    gate, up = np.split(doubles(x) @ doubles(weight), 2, axis=1)
    curve = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    bent = gate / (1 + np.exp(-gate)) if activation == "silu" else 0.5 * gate * (1 + np.tanh(curve))
    out: npt.NDArray[np.float64] = bent * up
    return out


def check(
    tokens: int,
    inputs: int,
    results: int,
    activation: str = "silu",
    dtype: Any = jnp.bfloat16,
    config: Config | None = None,
) -> None:
    """Compare a product of random numbers; `config` None: the one that an engine chooses."""
    random = np.random.default_rng(seed(tokens))
    x = jnp.asarray(random.standard_normal((tokens, inputs)), dtype)
    weight = jnp.asarray(random.standard_normal((inputs, 2 * results)) * inputs**-0.5, dtype)
    config = config or chosen(tokens, inputs, results, dtype)

    # One program, compiled without optimization, because compiling takes most of the time.
    @partial(jax.jit, compiler_options=haste())
    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return gated_matmul(x, weight, gate=GATES[activation], config=config, interpret=interpret)

    with without_races() as interpret:
        got = jax.block_until_ready(product(x, weight))
    assert got.dtype == jnp.dtype(dtype) and got.shape == (tokens, results)
    assert error(got, formula(x, weight, activation)) < LARGEST_ERROR[jnp.dtype(dtype).name]
