"""Check export and import of pages bit by bit, on any device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ops.kv_pages.api import export_pages, import_pages

LAYERS, SHAPE = 3, (12, 4, 2, 8)  # [N, B, K, D]
PAGES = np.array([7, 2, 12, 0, 13], np.int32)  # two of them are out of range
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn]
Pools = list[tuple[jax.Array, jax.Array]]


def pools(dtype: Any, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Pools:
    values = np.random.default_rng(seed).integers(-99, 99, (LAYERS, 2, *shape)).astype(np.float32)
    return [(jnp.asarray(k, dtype), jnp.asarray(v, dtype)) for k, v in values]


def check(dtype: Any, shape: tuple[int, ...] = SHAPE) -> None:
    """Check that pages arrive as they left, and nothing else changes."""
    here, there = pools(dtype, shape=shape), pools(dtype, 1, shape)
    kv_buffer = jax.jit(export_pages)(here, PAGES)
    assert kv_buffer.shape == (LAYERS, 2, len(PAGES), *shape[1:])
    assert kv_buffer.dtype == dtype
    after = jax.jit(import_pages)(there, PAGES, kv_buffer)
    for was, source, got in zip(jax.tree.leaves(there), jax.tree.leaves(here), jax.tree.leaves(after), strict=True):
        want = np.array(was)
        for page in PAGES[shape[0] > PAGES]:
            want[page] = source[page]
        np.testing.assert_array_equal(np.asarray(got), want)
