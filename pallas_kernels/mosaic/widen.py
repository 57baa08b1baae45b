"""Values of 8 bits in shared memory, as values of 16 in registers: by wide loads, and two values an instruction.

What a thread loads lies together, so a load takes 8 bytes, and what it makes of them lies together again: to be stored
it needs no exchange between threads. Nothing is rounded: what 8 bits can say, 16 can, and NaN stays NaN.
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
    """A tile [R, C] of int8 or e4m3 in shared memory, in `dtype` (float16 or bfloat16), in registers.

    R is a multiple of 16, C of 64. Store it whole into shared memory of any tiling, before a `commit_smem`.
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
        made: jax.Array = make(lambda _, values: _halves(values))(narrow)
        return made
    if narrow.dtype != jnp.int8:
        narrow = narrow.astype(jnp.float16).astype(jnp.float32)  # the hardware widens it to no other type
    return narrow.astype(dtype)


def _rows(columns: int) -> Any:
    """Eight neighbours in a thread, up to 128 in neighbouring threads: banks of shared memory are met once."""
    high, wide = (2, 128) if columns % 128 == 0 else (4, 64)
    return tiled((4 * high, wide), (high, wide), (8,), warps=(-5,), lanes=(-3, -2))


def tiled(*tiles: tuple[int, ...], warps: tuple[Any, ...], lanes: tuple[int, ...]) -> Any:
    """The registers that hold an array cut into tiles of tiles, the last of which is one register of a thread."""
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warps, lanes, -1)


def _halves(values: Any) -> Any:
    made = values.registers.copy()
    for at, register in np.ndenumerate(made):
        made[at] = inline.register_of(
            [half for word in inline.words(register) for half in inline.halves(word, values.mlir_dtype)]
        )
    return inline.FragmentedArray(_registers=made, _layout=values.layout, _is_signed=None)
