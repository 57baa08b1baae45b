"""Root-mean-square norms, in plain XLA, and those of queries and keys, which a kernel may apply itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp


def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, offset: float = 0.0, axes: tuple[int, ...] = (-1,)
) -> jax.Array:
    """Apply a root-mean-square norm over `axes` in float32, and return the dtype of `x`.

    offset: added to the weights in float32, because bfloat16 rounds the sum with weights near zero.
    """
    wide, gain = x.astype(jnp.float32), like(weight, x).astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=axes, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + eps) * (gain + offset if offset else gain)).astype(x.dtype)


def like(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Reshape `weight` to the rank of `x` by leading axes of size 1."""
    return weight.reshape((1,) * (x.ndim - weight.ndim) + weight.shape)


@partial(jax.tree_util.register_dataclass, data_fields=("q", "k"), meta_fields=("eps", "offset"))
@dataclass(frozen=True)
class HeadNorms:
    """The norms of each head of queries and keys; see `rms_norm`."""

    q: jax.Array  # [D]
    k: jax.Array  # [D]
    eps: float
    offset: float = 0.0

    def apply(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the normed q [T, H, D] and k [T, K, D]."""
        return rms_norm(q, self.q, self.eps, self.offset), rms_norm(k, self.k, self.eps, self.offset)
