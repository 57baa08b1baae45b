"""Widen 8-bit values in shared memory to 16-bit values in registers, by wide loads, two values per instruction.

A thread loads 8 adjacent bytes and its results are adjacent again, so storing them needs no
exchange between threads. Widening is exact: 16 bits represent every 8-bit value, and NaN stays NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.mosaic import compat, inline
from pallas_kernels.mosaic.compat import plgpu
from pallas_kernels.mosaic.interpret import Interpret, is_interpreting


def widened(tile: Any, dtype: Any, interpret: Interpret = None) -> jax.Array:
    """Return a tile [R, C] of int8 or e4m3 in shared memory as registers of `dtype` (float16 or bfloat16).

    R is a multiple of 16, C of 64. The result may be stored to shared memory of any tiling; call
    `commit_smem` after it.
    """
    if is_interpreting(interpret):
        plain: jax.Array = tile[...]
        return plain.astype(jnp.float32).astype(dtype)
    layout = _rows(tile.shape[1])
    narrow = compat.load(tile, layout)
    if jnp.dtype(dtype) == jnp.float16:
        make = plgpu.inline_mgpu(
            arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(tile.shape, dtype, layout=layout)
        )
        wide: jax.Array = make(lambda _, values: _halves(values))(narrow)
        return wide
    if narrow.dtype != jnp.int8:
        narrow = narrow.astype(jnp.float16).astype(jnp.float32)  # the hardware converts e4m3 to float16 only
    return narrow.astype(dtype)


def _rows(columns: int) -> Any:
    """Return a layout with 8 adjacent values per thread and up to 128 in adjacent threads, free of bank conflicts."""
    high, wide = (2, 128) if columns % 128 == 0 else (4, 64)
    return tiled((4 * high, wide), (high, wide), (8,), warps=(-5,), lanes=(-3, -2))


def tiled(*tiles: tuple[int, ...], warps: tuple[Any, ...], lanes: tuple[int, ...]) -> Any:
    """Return the layout of an array cut into nested tiles; the innermost tile is one register of a thread."""
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warps, lanes, -1)


def _halves(values: Any) -> Any:
    registers = values.registers.copy()
    for at, register in np.ndenumerate(registers):
        registers[at] = inline.register_of(
            [half for word in inline.words(register) for half in inline.halves(word, values.mlir_dtype)]
        )
    return inline.FragmentedArray(_registers=registers, _layout=values.layout, _is_signed=None)
