"""View arrays of small elements as uint32 words, because XLA moves data element by element.

On GPU, a scatter or gather of uint32 compiles to accesses of 4 to 16 bytes, one of bfloat16 to
accesses of 2. On CPU, a scatter of bfloat16 widens its whole operand to float32; a scatter of words
does not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def wide(x: jax.Array) -> jax.Array:
    """Bitcast x [..., D] to uint32 if its elements are smaller and fill whole words; otherwise return x."""
    several = 4 // x.dtype.itemsize
    if several < 2 or x.shape[-1] % several:
        return x
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, several), jnp.uint32)


def narrow(x: jax.Array, like: jax.Array) -> jax.Array:
    """Undo `wide`: bitcast x back to the dtype of `like`."""
    if x.dtype == like.dtype:
        return x
    return lax.bitcast_convert_type(x, like.dtype).reshape(*x.shape[:-1], -1)
