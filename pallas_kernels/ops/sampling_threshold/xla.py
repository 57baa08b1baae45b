"""Find sampling thresholds in plain XLA, for all rows of a step at once: by search, or bit by bit.

On a CPU every sum is costly, so there the bits of the threshold are found one after the other: that
takes fewer sums than the search of `search.py` has marks, and half as much to compile. The results
are the same.

Letters: G rows, V vocabulary, n logits of each of L lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.sampling_threshold.search import DEPTH, NOTHING, Found, Options, Seen, insert, search

LEAST, MOST = 128, 512  # bounds on the number of lanes
EACH = 16  # logits of a lane, if the vocabulary suffices; DEPTH of them are caught
BITS = 32


def thresholds(x: jax.Array, options: Options) -> Found:
    """Return the lowest logit that each row of x [G, V] float32 keeps, [G]; see `search.py`."""
    result: Found = lax.platform_dependent(x, options, cuda=swept, rocm=swept, tpu=swept, default=bisected)
    return result


def swept(x: jax.Array, options: Options) -> Found:
    """Compute `thresholds` by the search that the Hopper kernel shares."""
    rows, vocab = x.shape
    lanes = min(MOST, max(LEAST, 1 << (vocab // EACH).bit_length() - 1))
    deep = -(-vocab // lanes)
    x = jnp.pad(x, ((0, 0), (0, deep * lanes - vocab)), constant_values=-jnp.inf)

    def caught_below(limit: jax.Array | None) -> tuple[jax.Array, ...]:
        none = (jnp.full((rows, lanes), NOTHING, jnp.float32),) * DEPTH

        def step(n: jax.Array, caught: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            some = lax.dynamic_slice_in_dim(x, n * lanes, lanes, axis=1)
            return insert(caught, some if limit is None else jnp.where(some < limit[:, None], some, -jnp.inf))

        done: tuple[jax.Array, ...] = lax.fori_loop(0, deep, step, none)
        return done

    def sweep(limit: jax.Array, marks: Sequence[jax.Array], rate: jax.Array) -> tuple[Seen, list[jax.Array]]:
        each = jnp.where(rate[:, None] == 0, 1.0, weight)

        def kept(mark: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(x >= mark[:, None], each, 0.0), axis=1)

        return Seen(limit, kept(limit), caught_below(limit)), [kept(mark) for mark in marks]

    caught = caught_below(None)
    top = jnp.max(caught[0], axis=1)
    weight = jnp.exp2((x - top[:, None]) * options.rate[:, None])
    return search(top, jnp.sum(weight, axis=1), caught, options, sweep, vocab)


def bisected(x: jax.Array, options: Options) -> Found:
    """Compute `thresholds` bit by bit; skip top-k or top-p if no row asks for it."""
    counts, weighs, vocab = options.top_k > 0, options.top_p < 1, x.shape[1]
    keys, top = _key(x), jnp.max(x, axis=1)
    cut = jnp.maximum(top + options.least, NOTHING)
    few = jnp.minimum(options.top_k, vocab).astype(jnp.int32)
    threshold = _highest(keys, jnp.any(counts), lambda kept: jnp.sum(kept, axis=1, dtype=jnp.int32) >= few)
    cut = jnp.where(counts, jnp.fmax(cut, threshold), cut)  # fmax: a row that is not finite has no threshold
    weight = jnp.where(x >= cut[:, None], jnp.exp2((x - top[:, None]) * options.rate[:, None]), 0.0)
    most = options.top_p * jnp.sum(weight, axis=1)
    threshold = _highest(keys, jnp.any(weighs), lambda kept: jnp.sum(jnp.where(kept, weight, 0.0), axis=1) >= most)
    cut = jnp.where(weighs, jnp.fmax(cut, threshold), cut)
    return Found(cut, 1 + BITS * (counts.astype(jnp.int32) + weighs.astype(jnp.int32)))


def _key(x: jax.Array) -> jax.Array:
    """Map x to integers that sort as x does."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << BITS - 1)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _highest(keys: jax.Array, wanted: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return the highest number [G] at or above which `enough` of each row lies.

    NaN if there is none, or if `wanted` [] is false.
    """

    def step(bit: jax.Array, key: jax.Array) -> jax.Array:
        higher = key | (jnp.uint32(1 << BITS - 1) >> bit.astype(jnp.uint32))
        return jnp.where(enough(keys >= higher[:, None]), higher, key)

    key = lax.fori_loop(0, jnp.where(wanted, BITS, 0), step, jnp.zeros(len(keys), jnp.uint32))
    sign = jnp.uint32(1 << BITS - 1)
    threshold: jax.Array = lax.bitcast_convert_type(jnp.where(key >= sign, key ^ sign, ~key), jnp.float32)
    return threshold
