"""Rows of any length: single tokens batched over rows, longer rows in query blocks. Letters as in `attention_xla`."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import MASKED, Ragged
from pallas_kernels.xla.common import Pages, Parts, Rule, Running, absorb, begin, lse, mean, missing
from pallas_kernels.xla.single import single


class Tile(NamedTuple):
    """What is computed together of one row."""

    queries: int  # Q
    keys: int  # C at most


# A CPU multiplies large matrices faster; a short row would leave most of a large tile empty.
LARGE, SMALL = Tile(256, 256), Tile(64, 128)


def many(q: jax.Array, pool: Pages, ragged: Ragged, rule: Rule, queries: int | None) -> Parts:
    """Rows of any length, q [T, K, G, D]; no row is longer than `queries`, where that is given."""
    tokens, rows = q.shape[0], ragged.starts.shape[0]
    alone = ragged.lengths == 1  # [S]
    first = jnp.clip(ragged.starts, 0, tokens - 1)
    contexts = jnp.where(alone, ragged.contexts, 0)
    ones = single(q[first], pool, contexts, ragged.block_tables, rule)  # [S, ...] each
    place = jnp.where(alone, first, tokens)
    longest = min(tokens, queries or tokens)
    small = SMALL._replace(queries=min(SMALL.queries, longest))
    spare = LARGE.queries if longest > 2 * SMALL.queries else small.queries
    # A block may reach beyond the end of its row, hence of the tokens: padded here, masked where it is stored.
    padded = jnp.pad(q, ((0, spare), (0, 0), (0, 0), (0, 0)))
    out = tuple(
        jnp.full((tokens + spare, *part.shape[1:]), empty, part.dtype).at[place].set(part, mode="drop")
        for part, empty in zip(ones, (0, MASKED), strict=False)
    )

    def row(r: jax.Array, out: Parts) -> Parts:
        start, length, table = ragged.starts[r], ragged.lengths[r], ragged.block_tables[r]
        offset = ragged.contexts[r] - length  # position of the row's first token

        def blocks(tile: Tile, first: jax.Array | int, count: jax.Array, out: Parts) -> Parts:
            """With `count` blocks of the row from its token `first` on."""

            def one(b: jax.Array, out: Parts) -> Parts:
                token = first + b * tile.queries
                here = lax.dynamic_slice_in_dim(padded, start + token, tile.queries)  # [Q, K, G, D]
                mine = token + jnp.arange(tile.queries) < length
                fresh = _block(here, pool, table, offset + token, ragged.contexts[r], rule, tile.keys)
                return tuple(_stored(old, new, start + token, mine) for old, new in zip(out, fresh, strict=True))

            filled: Parts = lax.fori_loop(0, count, one, out)
            return filled

        done: jax.Array | int = 0
        if spare == LARGE.queries:  # whole large blocks, and one more for a rest of more than two small ones
            large = (length + LARGE.queries - 2 * SMALL.queries - 1) // LARGE.queries
            out, done = blocks(LARGE, 0, large, out), jnp.minimum(large * LARGE.queries, length)
        rest = jnp.where(length > 1, length - done, 0)
        return blocks(small, done, (rest + small.queries - 1) // small.queries, out)

    whole: Parts = lax.fori_loop(0, rows, row, out)
    return tuple(part[:tokens] for part in whole)


def _stored(old: jax.Array, new: jax.Array, at: jax.Array, mine: jax.Array) -> jax.Array:
    """old [T, ...] with those tokens of new [Q, ...] in it, from `at` on, that are the row's own."""
    before = lax.dynamic_slice_in_dim(old, at, new.shape[0])
    kept = jnp.where(mine.reshape(-1, *(1,) * (new.ndim - 1)), new, before)
    return lax.dynamic_update_slice_in_dim(old, kept, at, axis=0)


def _block(
    q: jax.Array,
    pool: Pages,
    table: jax.Array,
    position: jax.Array,
    context: jax.Array,
    rule: Rule,
    keys: int,
) -> Parts:
    """A query block [Q, K, G, D] of one row, first token at `position`, over `keys` of the row's keys at a time."""
    block, kv_heads, group, dim = q.shape
    pages = min(max(1, keys // pool.size), table.shape[0])
    span = pages * pool.size  # C
    table = jnp.pad(table, (0, missing(table.shape[0], pages)))
    stacked = q.transpose(1, 2, 0, 3).reshape(kv_heads, group * block, dim)  # one matrix product per kv head
    last = jnp.tile(position + jnp.arange(block), group)[:, None]  # [G * Q, 1], each query's own position
    lowest = rule.begin(position)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def body(i: jax.Array, state: Running) -> Running:
        ids = lax.dynamic_slice_in_dim(table, i * pages, pages)
        k, v = pool.read(ids, q.dtype)  # [C, K, D], or [K, C, D]
        key = i * span + jnp.arange(span)  # [C] positions
        seen, real = key[None, :] <= last, key < context  # [G * Q, C], [C]
        if rule.window is not None:
            seen &= key[None, :] >= rule.begin(last)
            real &= key >= lowest
        v = jnp.where(real[:, None] if pool.heads_first else real[:, None, None], v, jnp.zeros_like(v))  # see `single`
        axes = "kcd" if pool.heads_first else "ckd"
        score = product(f"kqd,{axes}->kqc", stacked, k)  # [K, G * Q, C]

        def mixed(weight: jax.Array) -> jax.Array:
            return product(f"kqc,{axes}->kqd", weight.astype(q.dtype), v)

        return absorb(state, score, seen[None], mixed, rule.softcap)

    reach = jnp.minimum(position + block, context)
    state = lax.fori_loop(lowest // span, (reach + span - 1) // span, body, begin((kv_heads, group * block), dim))
    mixed = mean(state)
    if rule.v_scale is not None:
        mixed = mixed * rule.v_scale[:, None, None]
    out = mixed.reshape(kv_heads, group, block, dim).transpose(2, 0, 1, 3).astype(q.dtype)
    return (out, lse(state).reshape(kv_heads, group, block).transpose(2, 0, 1)) if rule.lse else (out,)
