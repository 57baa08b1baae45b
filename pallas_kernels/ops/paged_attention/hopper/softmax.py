"""Constants and the soft cap of the online softmax in decode and prefill."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

LOG2E = math.log2(math.e)
# Score of a masked key: scaled by any positive factor, it is below the peak of a row that saw no key yet, which is
# MASKED and finite. So its weight is 0, which that of a finite score is not if the scale of the keys is small.
HIDDEN = -math.inf
SMALLEST = 2.0**-126  # smallest normal float32: a scale of 0 times HIDDEN would be NaN


def unit_of(raw: jax.Array | float, softcap: float | None) -> jax.Array | float:
    """Return the factor of scores in log2 units, given that from products to scores; capped scores have the latter."""
    if softcap is not None:
        return LOG2E
    return jnp.maximum(raw * LOG2E, SMALLEST) if isinstance(raw, jax.Array) else raw * LOG2E


def capped(score: jax.Array, raw: jax.Array | float, softcap: float) -> jax.Array:
    """Return softcap * tanh(score * raw / softcap), through e^x because `tanh.approx` has only 11 bits of precision."""
    grown = jnp.exp2(score * (raw * 2 * LOG2E / softcap))
    return softcap - (2 * softcap) / (grown + 1.0)
