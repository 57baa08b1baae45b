"""One query token per row, batched over rows. Letters as in `attention_xla`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.xla.common import Pages, Parts, Rule, Running, absorb, begin, lse, mean, missing

CHUNK_BYTES = 512 * 1024  # keys of one chunk over its rows; stays in a core's cache
ROWS = 16  # single tokens computed together
product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def single(q: jax.Array, pool: Pages, contexts: jax.Array, tables: jax.Array, rule: Rule) -> Parts:
    """One query per row, q [S, K, G, D], in groups of rows of like context: each group reads as far as its longest."""
    rows = q.shape[0]
    if rows <= ROWS:
        return _together(q, pool, contexts, tables, rule)
    order = jnp.argsort(-contexts)  # longest first
    count = -(-rows // ROWS)
    # What pads the last group has a context of 0: it reads nothing, and is not stored.
    order = jnp.pad(order, (0, count * ROWS - rows), constant_values=rows).reshape(count, ROWS)
    picked = jnp.minimum(order, rows - 1)
    reach = jnp.where(order < rows, contexts[picked], 0)
    parts: Parts = lax.map(
        lambda part: _together(part[0], pool, part[1], part[2], rule), (q[picked], reach, tables[picked])
    )  # [groups, ROWS, ...] each
    places = order.reshape(-1)
    return tuple(_dealt(part.reshape(count * ROWS, *part.shape[2:]), places, rows) for part in parts)


def _dealt(sorted_: jax.Array, places: jax.Array, rows: int) -> jax.Array:
    return jnp.zeros((rows, *sorted_.shape[1:]), sorted_.dtype).at[places].set(sorted_, mode="drop")


def _together(q: jax.Array, pool: Pages, contexts: jax.Array, tables: jax.Array, rule: Rule) -> Parts:
    """One query per row, batched over all S rows; reads as far as the longest context."""
    rows, kv_heads, group, dim = q.shape
    size, way = pool.size, _by_head(q) if pool.heads_first else _by_token(q)
    row_bytes = rows * size * kv_heads * dim * pool.k.dtype.itemsize
    pages = min(max(1, CHUNK_BYTES // row_bytes), max(1, 256 // size), tables.shape[1])  # per row and chunk
    span = pages * size  # C
    tables = jnp.pad(tables, ((0, 0), (0, missing(tables.shape[1], pages))))
    lowest = rule.begin(contexts - 1)  # [S]
    first = lowest // span  # chunks are cut where they always are, so that the bits do not hang on the window's place

    def chunk(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Pages [S, pages] of the i-th chunk that each row reads, and positions [S, C] or [1, C] of its keys."""
        if rule.window is None:
            return lax.dynamic_slice_in_dim(tables, i * pages, pages, axis=1), (i * span + jnp.arange(span))[None, :]
        column = (first + i)[:, None] * pages + jnp.arange(pages)[None, :]
        ids = jnp.take_along_axis(tables, column, axis=1, mode="clip")
        return ids, ((first + i) * span)[:, None] + jnp.arange(span)[None, :]

    def body(i: jax.Array, state: Running) -> Running:
        ids, key = chunk(i)
        k, v = pool.read(ids, q.dtype)
        seen = key < contexts[:, None]  # [S, C]
        if rule.window is not None:
            seen &= key >= lowest[:, None]
        # What a page held before is not to be seen, and may be NaN, which a weight of zero would let through.
        v = jnp.where(seen[:, None, :, None] if pool.heads_first else seen[:, :, None, None], v, jnp.zeros_like(v))
        return absorb(
            state, way.score(k), seen[:, None], lambda weight: way.mix(weight.astype(q.dtype), v), rule.softcap
        )

    trips = jnp.max((contexts + span - 1) // span - first)
    state = lax.fori_loop(0, trips, body, begin((rows, kv_heads * group), way.columns))
    mixed = way.own(mean(state))
    if rule.v_scale is not None:
        mixed = mixed * rule.v_scale[None, :, None, None]
    out = mixed.astype(q.dtype)
    return (out, lse(state).reshape(rows, kv_heads, group)) if rule.lse else (out,)


class _Way(NamedTuple):
    """How queries meet keys and values of a chunk."""

    score: Callable[[jax.Array], jax.Array]  # keys -> [S, H, C]
    mix: Callable[[jax.Array, jax.Array], jax.Array]  # weights [S, H, C] and values -> [S, H, columns]
    own: Callable[[jax.Array], jax.Array]  # what is mixed -> [S, K, G, D]
    columns: int


def _by_head(q: jax.Array) -> _Way:
    """Keys and values [S, K, C, D]: products of each head."""
    rows, kv_heads, group, dim = q.shape

    def score(k: jax.Array) -> jax.Array:
        # The keys on the left, where a CPU reads them as they lie.
        return product("skcd,skgd->skcg", k, q).swapaxes(2, 3).reshape(rows, kv_heads * group, -1)

    def mix(weight: jax.Array, v: jax.Array) -> jax.Array:
        grouped = weight.reshape(rows, kv_heads, group, -1)
        return product("skgc,skcd->skgd", grouped, v).reshape(rows, kv_heads * group, dim)

    return _Way(score, mix, lambda mixed: mixed.reshape(q.shape), dim)


def _by_token(q: jax.Array) -> _Way:
    """Keys and values [S, C, K, D]: products over whole tokens [K * D], as they lie in the pages.

    Queries are spread block-diagonally over the kv heads, and of the mixed values each query keeps its own head's. That
    is K times the arithmetic, but one plain matrix product per row and chunk; products per head would first transpose
    the keys, and sums of products are not vectorised over D.
    """
    rows, kv_heads, group, dim = q.shape
    own = jnp.eye(kv_heads, dtype=q.dtype)
    spread = (q[:, :, :, None] * own[None, :, None, :, None]).reshape(rows, -1, kv_heads * dim)  # [S, H, K * D]

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(rows, -1, kv_heads * dim)

    def kept(mixed: jax.Array) -> jax.Array:
        wide = mixed.reshape(rows, kv_heads, group, kv_heads, dim)
        return jnp.einsum("skgjd,kj->skgd", wide, own.astype(jnp.float32), precision="highest")

    return _Way(
        lambda k: product("sce,she->sch", flat(k), spread).swapaxes(1, 2),
        lambda weight, v: product("shc,sce->she", weight, flat(v)),
        kept,
        kv_heads * dim,
    )
