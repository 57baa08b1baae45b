"""Check expert products against float64: in the interpreter, or on a GPU if there is one."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pallas_kernels.ops.grouped_matmul.hopper import matmul as grouped
from pallas_kernels.ops.grouped_matmul.hopper.matmul import Config, plan
from pallas_kernels.ops.grouped_matmul.plan import Groups
from tests.support.kernels.interpreted import haste, seed, without_races
from tests.support.kernels.reference import doubles, error

# Which of three experts each pair chose: sizes around a tile, none, one, all, and some on other shards.
ROUTES = {
    "one each": [2, 0, 1],
    "all to one": [1] * 70,
    "none to the middle": [0] * 9 + [2] * 8,
    "a tile and one more": [0] * 17 + [1] * 16 + [2] * 15,
    "elsewhere": [-1, 0, 3, 1, 7, 1],
    "all elsewhere": [3] * 5,
    "one": [2],
}


def operands(pairs: int, width: int, outputs: int, dtype: Any, experts: int = 3) -> tuple[jax.Array, jax.Array]:
    draw = np.random.default_rng(seed(pairs))
    x, weight = draw.standard_normal((pairs, width)), draw.standard_normal((experts, width, outputs)) * width**-0.5
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


def formula(x: Any, weight: Any, chosen: list[int]) -> npt.NDArray[np.float64]:
    """Return each pair's product; zeros if its expert is on another shard."""
    out, rows = np.zeros((len(chosen), weight.shape[2])), doubles(x)
    for expert in range(len(weight)):
        pairs = np.flatnonzero(np.equal(chosen, expert))
        out[pairs] = rows[pairs] @ doubles(weight[expert])
    return out


def by_pairs(out: Any, work: Groups) -> npt.NDArray[np.float64]:
    place = np.asarray(work.place)
    padded = np.concatenate([doubles(out), np.zeros((1, out.shape[1]))])
    return padded[place]


CONFIGS = {
    "swapped": Config(8, 128, 3, 2, True, 2),
    "swapped 32": Config(32, 128, 2, 2, True, 3),
    "swapped narrow": Config(16, 64, 2, 1, True, 2),
    "straight": Config(128, 128, 2, 2, False, 2),
    "straight narrow": Config(64, 64, 4, 1, False, 2),
}


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def gated_formula(product: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return SwiGLU of the two halves of each product."""
    gate, up = np.split(product, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def check(
    config: Config,
    chosen: list[int],
    dtype: Any,
    out_dtype: Any,
    size: tuple[int, int, int] = (3, 128, 128),
    *,
    gated: bool = False,
) -> None:
    experts, width, outputs = size
    x, weight = operands(len(chosen), width, 2 * outputs if gated else outputs, dtype, experts)
    _compare(config, chosen, x, weight, None, weight, out_dtype, gated)


def _compare(
    config: Config, chosen: list[int], x: jax.Array, weight: jax.Array, scale: jax.Array | None, wide: Any,
    out_dtype: Any, gated: bool,
) -> None:  # fmt: skip
    """Compare with float64; `wide`: the weights as they are meant."""
    work = plan(jnp.array(chosen), len(weight), config.rows)

    # One program, compiled without optimization, because compiling takes most of the time.
    @partial(jax.jit, compiler_options=haste())
    def multiplied(x: jax.Array, weight: jax.Array, work: Groups, scale: jax.Array | None) -> jax.Array:
        gate = swiglu if gated else None
        return grouped.grouped_matmul(
            x, weight, work, scale=scale, out_dtype=out_dtype, gate=gate, config=config, interpret=interpret
        )

    with without_races() as interpret:
        got = by_pairs(jax.block_until_ready(multiplied(x[work.source], weight, work, scale)), work)
    most = {"float32": 1e-6, "float16": 5e-4, "bfloat16": 4e-3}[jnp.dtype(out_dtype).name]
    want = formula(x, wide, chosen)
    assert error(got, gated_formula(want) if gated else want) < most


GATED = ["swapped", "swapped 32", "straight"]  # forms with two consumers

# 8-bit weights: all of these have swapped operands.
NARROW = {
    "decode": Config(8, 128, 2, 2, True, 2, 64),
    "deep": Config(32, 128, 3, 2, True, 3, 128),
    "prefill": Config(128, 128, 2, 2, True, 2, 64),
}


def check_narrow(
    config: Config,
    chosen: list[int],
    stored: Any,
    scales: int,
    dtype: Any,
    out_dtype: Any,
    size: tuple[int, int, int] = (3, 256, 128),
    *,
    gated: bool = False,
) -> None:
    experts, width, outputs = size
    outputs *= 2 if gated else 1
    random = np.random.default_rng(seed(len(chosen)))
    x = jnp.asarray(random.standard_normal((len(chosen), width)), dtype)
    values = random.standard_normal((experts, width, outputs)) * (40 if stored == jnp.int8 else 1)
    values = jnp.asarray(np.clip(np.rint(values), -127, 127) if stored == jnp.int8 else values, stored)
    scale = jnp.asarray(random.uniform(0.01, 0.1, (experts, scales, outputs)), jnp.float32)
    wide = doubles(values) * np.repeat(doubles(scale), width // scales, axis=1)
    _compare(config, chosen, x, values, scale, wide, out_dtype, gated)
