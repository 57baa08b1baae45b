"""Log-probabilities of sampled tokens: the token's own, its rank, and the best of its row.

Letters: G rows, V vocabulary, C chunks of CHUNK tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sched.api.params import MAX_LOGPROBS

CHUNK = 128


def logprobs_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Pack each row's log-probability, rank, best ids and their log-probabilities into int32.

    Floats are stored as bits; missing ids of a small vocabulary are -1.
    logits [G, V], tokens [G] -> [G, 2 + 2 * MAX_LOGPROBS] int32.
    """
    top = jnp.max(logits, axis=1, keepdims=True)
    total = jnp.log(jnp.sum(jnp.exp(logits - top), axis=1, keepdims=True))
    mine = jnp.take_along_axis(logits, tokens[:, None], axis=1)  # [G, 1]
    rank = 1 + jnp.sum(logits > mine, axis=1, dtype=jnp.int32)
    found, ids = best(logits, min(MAX_LOGPROBS, logits.shape[1]))
    missing = ((0, 0), (0, MAX_LOGPROBS - found.shape[1]))
    told = jnp.concatenate([mine, jnp.pad(found, missing)], axis=1) - top - total
    ids, bits = jnp.pad(ids, missing, constant_values=-1), lax.bitcast_convert_type(told, jnp.int32)
    return jnp.concatenate([bits[:, :1], rank[:, None], ids, bits[:, 1:]], axis=1)


def best(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the `count` highest values of each row [G, V], descending, and their int32 indices.

    Equals `lax.top_k`, first index first among equals, which sorts whole rows on a GPU for more than
    sixteen values. Every result lies in one of the `count` chunks with the highest maxima: for any
    other chunk, `count` values that rank higher exist.
    """
    width = x.shape[1]
    if width <= 4 * count * CHUNK:
        found, ids = lax.top_k(x, count)
        return found, ids.astype(jnp.int32)
    chunks = jnp.pad(x, ((0, 0), (0, -width % CHUNK)), constant_values=-jnp.inf).reshape(len(x), -1, CHUNK)
    _, chosen = lax.top_k(jnp.max(chunks, axis=2), count)
    # In vocabulary order, so that the first of equal values is found first.
    index = (jnp.sort(chosen, axis=1)[:, :, None] * CHUNK + jnp.arange(CHUNK)[None, None]).reshape(len(x), -1)
    some = jnp.take_along_axis(x, jnp.minimum(index, width - 1), axis=1)
    found, at = lax.top_k(jnp.where(index < width, some, -jnp.inf), count)
    return found, jnp.take_along_axis(index, at, axis=1).astype(jnp.int32)
