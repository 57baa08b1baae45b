"""Shared-memory buffers in the layout that Hopper's copy and tensor-core units require."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.mosaic.compat import plgpu


def tiled(shape: tuple[int, ...], dtype: Any, most: int = 128) -> Any:
    """Return a scratch buffer in swizzled tiles of 8 rows of up to `most` bytes, as TMA and tensor cores use."""
    size = jnp.dtype(dtype).itemsize
    swizzle = next(count for count in (128, 64, 32) if count <= most and shape[-1] * size % count == 0)
    transforms = plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)
