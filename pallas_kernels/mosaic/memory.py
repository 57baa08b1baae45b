"""Shared-memory buffers in the layout that Hopper's copy and tensor-core units require."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.mosaic.compat import plgpu


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a scratch buffer in swizzled tiles of 8 rows of up to 128 bytes, as TMA and tensor cores use."""
    size = jnp.dtype(dtype).itemsize
    width = min(128 // size, shape[-1])
    transforms = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * size)
    return plgpu.SMEM(shape, dtype, transforms=transforms)
