"""Constants and the soft cap of the online softmax in decode and prefill."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.layout import MASKED

LOG2E = math.log2(math.e)
# Peak of a row that saw no key yet: below any score, and so far above MASKED that masked scores get weight 0.
LEAST = MASKED * 1e-10


def capped(score: jax.Array, raw: jax.Array | float, softcap: float) -> jax.Array:
    """Return softcap * tanh(score * raw / softcap), through e^x because `tanh.approx` has only 11 bits of precision."""
    grown = jnp.exp2(score * (raw * 2 * LOG2E / softcap))
    return softcap - (2 * softcap) / (grown + 1.0)
