"""One query token per row, batched over rows. Letters as in `attention_xla`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.xla.common import Parts, Rule, Running, absorb, begin, lse, mean, missing, take

CHUNK_BYTES = 256 * 1024  # keys of one chunk over its rows; stays in a core's cache
ROWS = 16  # single tokens computed together


def single(
    q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, contexts: jax.Array, tables: jax.Array, rule: Rule
) -> Parts:
    """One query per row, q [S, K, G, D], in groups of rows of like context: each group reads as far as its longest."""
    rows = q.shape[0]
    if rows <= ROWS:
        return _together(q, k_pool, v_pool, contexts, tables, rule)
    order = jnp.argsort(-contexts)  # longest first
    count = -(-rows // ROWS)
    # What pads the last group has a context of 0: it reads nothing, and is not stored.
    order = jnp.pad(order, (0, count * ROWS - rows), constant_values=rows).reshape(count, ROWS)
    picked = jnp.minimum(order, rows - 1)
    reach = jnp.where(order < rows, contexts[picked], 0)
    parts: Parts = lax.map(
        lambda part: _together(part[0], k_pool, v_pool, part[1], part[2], rule), (q[picked], reach, tables[picked])
    )  # [groups, ROWS, ...] each
    places = order.reshape(-1)
    return tuple(_dealt(part.reshape(count * ROWS, *part.shape[2:]), places, rows) for part in parts)


def _dealt(sorted_: jax.Array, places: jax.Array, rows: int) -> jax.Array:
    return jnp.zeros((rows, *sorted_.shape[1:]), sorted_.dtype).at[places].set(sorted_, mode="drop")


def _together(
    q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, contexts: jax.Array, tables: jax.Array, rule: Rule
) -> Parts:
    """One query per row, q [S, K, G, D], batched over all S rows; reads as far as the longest context.

    Both products run over whole tokens [K * D], as they lie in the pages: queries are spread block-diagonally over
    the kv heads, and of the mixed values each query keeps its own head's. That is K times the arithmetic, but one
    plain matrix product per row and chunk; products per head would first transpose the keys, and sums of products
    are not vectorised over D.
    """
    rows, kv_heads, group, dim = q.shape
    size, own = k_pool.shape[1], jnp.eye(kv_heads, dtype=q.dtype)
    row_bytes = rows * size * kv_heads * dim * k_pool.dtype.itemsize
    pages = min(max(1, CHUNK_BYTES // row_bytes), max(1, 256 // size), tables.shape[1])  # per row and chunk
    span = pages * size  # C
    tables = jnp.pad(tables, ((0, 0), (0, missing(tables.shape[1], pages))))
    spread = (q[:, :, :, None] * own[None, :, None, :, None]).reshape(rows, -1, kv_heads * dim)  # [S, H, K * D]
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
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
        k, v = (take(pool, ids).astype(q.dtype).reshape(rows, span, -1) for pool in (k_pool, v_pool))  # [S, C, K * D]
        score = product("sce,she->sch", k, spread).swapaxes(1, 2)  # [S, H, C]
        seen = key < contexts[:, None]  # [S, C]
        if rule.window is not None:
            seen &= key >= lowest[:, None]
        # What a page held before is not to be seen, and may be NaN, which a weight of zero would let through.
        v = jnp.where(seen[..., None], v, jnp.zeros_like(v))
        return absorb(
            state, score, seen[:, None], lambda weight: product("shc,sce->she", weight.astype(q.dtype), v), rule.softcap
        )

    trips = jnp.max((contexts + span - 1) // span - first)
    state = lax.fori_loop(0, trips, body, begin((rows, kv_heads * group), kv_heads * dim))
    mixed = mean(state).reshape(rows, kv_heads, group, kv_heads, dim)
    mixed = jnp.einsum("skgjd,kj->skgd", mixed, own.astype(jnp.float32), precision="highest")
    if rule.v_scale is not None:
        mixed = mixed * rule.v_scale[None, :, None, None]
    out = mixed.astype(q.dtype)
    return (out, lse(state).reshape(rows, kv_heads, group)) if rule.lse else (out,)
