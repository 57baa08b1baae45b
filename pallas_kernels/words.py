"""Arrays of small elements seen as words: XLA moves what it is told to move, element by element.

On GPU a scatter or gather of uint32 becomes accesses of 4 to 16 bytes where one of bfloat16 has 2; on CPU a scatter of
bfloat16 widens all of its operand to float32, and one of words does not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def wide(x: jax.Array) -> jax.Array:
    """x [..., D] with its bytes as uint32, where its elements are smaller and fill words."""
    several = 4 // x.dtype.itemsize
    if several < 2 or x.shape[-1] % several:
        return x
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, several), jnp.uint32)


def narrow(x: jax.Array, like: jax.Array) -> jax.Array:
    """What `wide` made of an array of the dtype of `like`, turned back."""
    if x.dtype == like.dtype:
        return x
    return lax.bitcast_convert_type(x, like.dtype).reshape(*x.shape[:-1], -1)
