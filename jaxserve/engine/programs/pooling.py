"""Sums of the final hidden states of spans of a step, for requests that want a vector instead of text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

POOLED = 8  # N: spans summed together


def pool(hidden: jax.Array, begins: jax.Array, lengths: jax.Array) -> jax.Array:
    """Sum rows [begin, begin + length) of hidden [T, E] for each of N spans -> [N, E] float32.

    A sum over a row that is not finite is nan; rows of other spans do not reach it.
    """
    at = jnp.arange(hidden.shape[0], dtype=jnp.int32)[None, :]
    mine = (at >= begins[:, None]) & (at < (begins + lengths)[:, None])  # [N, T]
    finite = jnp.isfinite(hidden).all(axis=1)  # [T]
    clean = jnp.where(finite[:, None], hidden, 0)  # 0 * nan is nan: another span's must not be in the product
    # A product sums in a fixed order, which a scatter on a GPU does not, and keeps no float32 copy of all rows.
    sums = lax.dot_general(
        mine.astype(hidden.dtype),
        clean,
        (((1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    broken = (mine & ~finite[None, :]).any(axis=1)
    return jnp.where(broken[:, None], jnp.nan, sums)
