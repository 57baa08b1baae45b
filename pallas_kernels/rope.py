"""Rotary embedding of queries and keys, in plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Turn = tuple[jax.Array, jax.Array]  # cos and sin of each token's angles, each [T, 1, D / 2] float32


def rotate(x: jax.Array, turn: Turn | None) -> jax.Array:
    """Rotate the pairs (i, i + D / 2) of x [T, heads, D] in float32; return x unchanged if `turn` is None."""
    if turn is None:
        return x
    cos, sin = turn
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)
