"""Check export and import of pages against float64: in the interpreter, or on a GPU if there is one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LAYERS, SHAPE = 3, (12, 4, 2, 8)  # [N, B, K, D]
PAGES = np.array([7, 2, 12, 0, 13], np.int32)  # two of them are out of range
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn]
Pools = list[tuple[jax.Array, jax.Array]]


def pools(dtype: Any, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Pools:
    values = np.random.default_rng(seed).integers(-99, 99, (LAYERS, 2, *shape)).astype(np.float32)
    return [(jnp.asarray(k, dtype), jnp.asarray(v, dtype)) for k, v in values]
