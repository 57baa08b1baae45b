"""The search of `border_search.py` by plain XLA, for all rows of a step together.

G rows, V vocabulary, n numbers of each of L lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.border_search import DEPTH, NOTHING, Found, Options, Seen, insert, search

LEAST, MOST = 128, 512  # lanes
EACH = 16  # numbers of a lane, where there are enough: what is caught is DEPTH of them


def borders(x: jax.Array, options: Options) -> Found:
    """Of logits x [G, V] float32 what each row keeps at least, [G]: see `border_search`."""
    several, halves = partial(swept, halves=False), partial(swept, halves=True)
    found: Found = lax.platform_dependent(x, options, cuda=several, rocm=several, tpu=several, default=halves)
    return found


def swept(x: jax.Array, options: Options, *, halves: bool) -> Found:
    """As `borders`, with the sweeps that are for a CPU (`halves`) or for a GPU."""
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

    def sweep(
        limit: jax.Array | None, marks: Sequence[jax.Array], rate: jax.Array
    ) -> tuple[Seen | None, list[jax.Array]]:
        each = jnp.where(rate[:, None] == 0, 1.0, weight)

        def kept(mark: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(x >= mark[:, None], each, 0.0), axis=1)

        sums = [kept(mark) for mark in marks]
        if limit is None:
            return None, sums
        return Seen(limit, kept(limit), caught_below(limit)), sums

    caught = caught_below(None)
    top = jnp.max(caught[0], axis=1)
    weight = jnp.exp2((x - top[:, None]) * options.rate[:, None])
    return search(top, jnp.sum(weight, axis=1), caught, options, sweep, vocab, halves)
