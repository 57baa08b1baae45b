"""Attention sinks: one more score in the softmax of each head, learned, that carries no value."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def with_sinks(mixed: jax.Array, lse: jax.Array, sinks: jax.Array) -> jax.Array:
    """mixed [T, H, D] as if exp(sinks [H]) had been in the sum that `lse` [T, H] is the logarithm of.

    exp(lse) / (exp(lse) + exp(sink)) is a sigmoid: so a kernel that returns its lse need not know of sinks.
    """
    kept = jax.nn.sigmoid(lse - sinks.astype(jnp.float32)[None, :])
    return (mixed.astype(jnp.float32) * kept[..., None]).astype(mixed.dtype)
