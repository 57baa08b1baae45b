"""Attention sinks: a learned score per head that joins the softmax but carries no value."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def with_sinks(mixed: jax.Array, lse: jax.Array, sinks: jax.Array) -> jax.Array:
    """Return mixed [T, H, D] as if the sums behind `lse` [T, H] had included exp(sinks [H]).

    The factor exp(lse) / (exp(lse) + exp(sink)) is a sigmoid, so kernels that return lse need no
    support for sinks.
    """
    kept = jax.nn.sigmoid(lse - sinks.astype(jnp.float32)[None, :])
    return (mixed.astype(jnp.float32) * kept[..., None]).astype(mixed.dtype)
