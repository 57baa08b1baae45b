"""Shared memory as Hopper's units for copies and products like it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.mosaic.compat import plgpu


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """A scratch buffer in tiles of 8 rows of up to 128 bytes, swizzled: what TMA writes, tensor cores read."""
    size = jnp.dtype(dtype).itemsize
    width = min(128 // size, shape[-1])
    transforms = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * size)
    return plgpu.SMEM(shape, dtype, transforms=transforms)
