"""Ragged paged attention in plain XLA: for CPU, and the fallback anywhere.

out[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, h // G]) v[j, h // G]   over j <= positions[t] of t's own row

Keys and values are read from the pages of the row's block table, so `write_kv` of the same step comes first.
Softmax is online over chunks of pages: temporaries are bounded by the chunk, whatever the context. Sums are
float32. Padding tokens, and rows whose context is 0, give zeros.

Letters: T tokens, S rows, P pages per row, N pages in the pool, B page size, H query heads, K kv heads,
G = H / K queries per kv head, D head dim, C = tokens in a chunk of pages, Q = tokens in a query block.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import Ragged

MASKED = -1e30  # finite: a masked chunk must not make NaN of exp(-inf + inf)
QUERY_BLOCK = 64  # tokens of one row computed together
KEY_BLOCK = 128  # tokens of keys read together for a query block
CHUNK_BYTES = 256 * 1024  # keys of one decode chunk over its rows; stays in a core's cache
ROWS = 16  # single tokens computed together


class _Running(NamedTuple):
    """Online softmax: highest score, sum of weights and weighted values so far, all float32."""

    peak: jax.Array  # [..., rows]
    total: jax.Array  # [..., rows]
    mixed: jax.Array  # [..., rows, D]


def write_kv(
    k_pool: jax.Array, v_pool: jax.Array, k: jax.Array, v: jax.Array, ragged: Ragged
) -> tuple[jax.Array, jax.Array]:
    """Put k, v [T, K, D] at `ragged.write` of the pools [N, B, K, D]; padding tokens are dropped."""
    return _scatter(k_pool, k, ragged.write), _scatter(v_pool, v, ragged.write)


def paged_attention(
    q: jax.Array,  # [T, H, D]
    k_pool: jax.Array,  # [N, B, K, D]
    v_pool: jax.Array,  # [N, B, K, D]
    ragged: Ragged,
    *,
    scale: float,
    decode: bool = False,
) -> jax.Array:
    """Causal attention of every token to its own row's pages; [T, H, D] in the dtype of `q`.

    `decode=True` promises that token i is all of row i (T = S, lengths 0 or 1), and skips the general case.
    """
    _check(q, k_pool, v_pool, ragged, decode)
    grouped = q.reshape(q.shape[0], k_pool.shape[2], -1, q.shape[2])  # [T, K, G, D]
    if decode:
        out = _single(grouped, k_pool, v_pool, ragged.contexts, ragged.block_tables, scale)
    else:
        out = _general(grouped, k_pool, v_pool, ragged, scale)
    return out.reshape(q.shape)


def _check(q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, ragged: Ragged, decode: bool) -> None:
    if q.ndim != 3 or k_pool.ndim != 4 or k_pool.shape != v_pool.shape:
        raise ValueError(f"q [T, H, D] is {q.shape}; pools [N, B, K, D] are {k_pool.shape} and {v_pool.shape}")
    if q.shape[2] != k_pool.shape[3] or q.shape[1] % k_pool.shape[2]:
        raise ValueError(f"{q.shape[1:]=} (H, D) must fit {k_pool.shape[2:]=} (K, D): equal D, H a multiple of K")
    rows = ragged.block_tables.shape[0]
    if decode and q.shape[0] != rows:
        raise ValueError(f"decode=True needs one token per row; there are {q.shape[0]} tokens and {rows} rows")


def _scatter(pool: jax.Array, new: jax.Array, where: jax.Array) -> jax.Array:
    # In the pool's own shape: for one kv head per shard, XLA on CPU gives the result of a reshape another layout and
    # copies the whole pool back, twice per layer (80 ms a step for a pool of 128 MiB).
    size = pool.shape[1]
    return pool.at[where // size, where % size].set(new.astype(pool.dtype), mode="drop", unique_indices=True)


def _take(pool: jax.Array, pages: jax.Array) -> jax.Array:
    """Whole pages [..., c] of the pool as keys [..., c * B, K, D]. One gather of long contiguous slices."""
    _, size, heads, dim = pool.shape
    got = jnp.take(pool, pages, axis=0, mode="clip")  # [..., c, B, K, D]
    return got.reshape(*pages.shape[:-1], pages.shape[-1] * size, heads, dim)


def _missing(columns: int, pages: int) -> int:
    """Columns that a block table lacks to be two chunks or more. Of one chunk XLA knows what every turn of the loop
    reads: on CPU it moves the gather out of the loop and copies the whole pool for it, a second for 2 GiB."""
    return max(2 * pages - columns, -columns % pages)


def _begin(shape: tuple[int, ...], dim: int) -> _Running:
    zeros = jnp.zeros(shape, jnp.float32)
    return _Running(zeros + MASKED, zeros, jnp.zeros((*shape, dim), jnp.float32))


def _finish(state: _Running) -> jax.Array:
    """Weighted mean of the values; zeros where nothing was attended to."""
    return state.mixed / jnp.maximum(state.total, 1e-30)[..., None]


def _single(
    q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, contexts: jax.Array, tables: jax.Array, scale: float
) -> jax.Array:
    """One query per row, q [S, K, G, D], in groups of rows of like context: each group reads as far as its longest."""
    rows, kv_heads, group, dim = q.shape
    if rows <= ROWS:
        return _together(q, k_pool, v_pool, contexts, tables, scale)
    order = jnp.argsort(-contexts)  # longest first
    count = -(-rows // ROWS)
    # What pads the last group has a context of 0: it reads nothing, and is not stored.
    order = jnp.pad(order, (0, count * ROWS - rows), constant_values=rows).reshape(count, ROWS)
    picked = jnp.minimum(order, rows - 1)
    reach = jnp.where(order < rows, contexts[picked], 0)
    mixed = lax.map(
        lambda part: _together(part[0], k_pool, v_pool, part[1], part[2], scale), (q[picked], reach, tables[picked])
    )  # [groups, ROWS, K, G, D]
    flat = mixed.reshape(count * ROWS, kv_heads, group, dim)
    return jnp.zeros_like(q).at[order.reshape(-1)].set(flat, mode="drop")


def _together(
    q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, contexts: jax.Array, tables: jax.Array, scale: float
) -> jax.Array:
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
    tables = jnp.pad(tables, ((0, 0), (0, _missing(tables.shape[1], pages))))
    spread = ((q * scale)[:, :, :, None] * own[None, :, None, :, None]).reshape(
        rows, -1, kv_heads * dim
    )  # [S, H, K * D]
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def body(i: jax.Array, state: _Running) -> _Running:
        ids = lax.dynamic_slice_in_dim(tables, i * pages, pages, axis=1)  # [S, pages]
        k, v = (_take(pool, ids).astype(q.dtype).reshape(rows, span, -1) for pool in (k_pool, v_pool))  # [S, C, K * D]
        score = product("sce,she->sch", k, spread).swapaxes(1, 2)  # [S, H, C]
        seen = (i * span + jnp.arange(span))[None, :] < contexts[:, None]  # [S, C]
        # What a page held before is not to be seen, and may be NaN, which a weight of zero would let through.
        v = jnp.where(seen[..., None], v, jnp.zeros_like(v))
        seen = seen[:, None]  # [S, 1, C]
        score = jnp.where(seen, score, MASKED)
        peak = jnp.maximum(state.peak, jnp.max(score, axis=-1))  # [S, H]
        # Masked weights are set to zero, not left to exp: in a row of context 0 the peak itself is MASKED.
        weight = jnp.where(seen, jnp.exp(score - peak[..., None]), 0.0)
        fade = jnp.exp(state.peak - peak)
        new = product("shc,sce->she", weight.astype(q.dtype), v)  # [S, H, K * D]
        return _Running(peak, state.total * fade + jnp.sum(weight, axis=-1), state.mixed * fade[..., None] + new)

    trips = (jnp.max(contexts) + span - 1) // span
    state = lax.fori_loop(0, trips, body, _begin((rows, kv_heads * group), kv_heads * dim))
    mixed = _finish(state).reshape(rows, kv_heads, group, kv_heads, dim)
    return jnp.einsum("skgjd,kj->skgd", mixed, own.astype(jnp.float32), precision="highest").astype(q.dtype)


def _general(q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, ragged: Ragged, scale: float) -> jax.Array:
    """Rows of any length, q [T, K, G, D]: single tokens batched over rows, longer rows in query blocks."""
    tokens = q.shape[0]
    rows = ragged.starts.shape[0]
    alone = ragged.lengths == 1  # [S]
    first = jnp.clip(ragged.starts, 0, tokens - 1)
    single = _single(
        q[first], k_pool, v_pool, jnp.where(alone, ragged.contexts, 0), ragged.block_tables, scale
    )  # [S, K, G, D]
    out = jnp.zeros_like(q).at[jnp.where(alone, first, tokens)].set(single, mode="drop")
    block = min(QUERY_BLOCK, tokens)
    # A block may reach beyond the end of its row, hence of the tokens: padded here, masked where it is stored.
    padded = jnp.pad(q, ((0, block), (0, 0), (0, 0), (0, 0)))
    out = jnp.pad(out, ((0, block), (0, 0), (0, 0), (0, 0)))

    def row(r: jax.Array, out: jax.Array) -> jax.Array:
        start, length, table = ragged.starts[r], ragged.lengths[r], ragged.block_tables[r]
        offset = ragged.contexts[r] - length  # position of the row's first token

        def one(b: jax.Array, out: jax.Array) -> jax.Array:
            begin = b * block
            here = lax.dynamic_slice_in_dim(padded, start + begin, block)  # [Q, K, G, D]
            mixed = _block(here, k_pool, v_pool, table, offset + begin, ragged.contexts[r], scale)
            old = lax.dynamic_slice_in_dim(out, start + begin, block)
            mine = (begin + jnp.arange(block) < length)[:, None, None, None]
            return lax.dynamic_update_slice_in_dim(out, jnp.where(mine, mixed, old), start + begin, axis=0)

        blocks = jnp.where(length > 1, (length + block - 1) // block, 0)
        filled: jax.Array = lax.fori_loop(0, blocks, one, out)
        return filled

    whole: jax.Array = lax.fori_loop(0, rows, row, out)
    return whole[:tokens]


def _block(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    table: jax.Array,
    position: jax.Array,
    context: jax.Array,
    scale: float,
) -> jax.Array:
    """A query block [Q, K, G, D] of one row, first token at `position`, over the row's keys so far."""
    block, kv_heads, group, dim = q.shape
    pages = min(max(1, KEY_BLOCK // k_pool.shape[1]), table.shape[0])
    span = pages * k_pool.shape[1]  # C
    table = jnp.pad(table, (0, _missing(table.shape[0], pages)))
    # [K, G * Q, D]: one matrix product per kv head.
    stacked = (q.transpose(1, 2, 0, 3).reshape(kv_heads, group * block, dim) * scale).astype(q.dtype)
    last = jnp.tile(position + jnp.arange(block), group)  # [G * Q], each query's own position
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def body(i: jax.Array, state: _Running) -> _Running:
        ids = lax.dynamic_slice_in_dim(table, i * pages, pages)
        k, v = _take(k_pool, ids).astype(q.dtype), _take(v_pool, ids).astype(q.dtype)  # [C, K, D]
        key = i * span + jnp.arange(span)  # [C] positions
        v = jnp.where((key < context)[:, None, None], v, jnp.zeros_like(v))  # as in `_single`
        score = product("kqd,ckd->kqc", stacked, k)  # [K, G * Q, C]
        score = jnp.where((key[None, :] <= last[:, None])[None], score, MASKED)
        peak = jnp.maximum(state.peak, jnp.max(score, axis=-1))  # [K, G * Q]
        weight = jnp.exp(score - peak[..., None])  # the first chunk holds key 0, so every peak is a real score
        fade = jnp.exp(state.peak - peak)
        new = product("kqc,ckd->kqd", weight.astype(q.dtype), v)
        return _Running(peak, state.total * fade + jnp.sum(weight, axis=-1), state.mixed * fade[..., None] + new)

    reach = jnp.minimum(position + block, context)
    state = lax.fori_loop(0, (reach + span - 1) // span, body, _begin((kv_heads, group * block), dim))
    mixed = _finish(state).reshape(kv_heads, group, block, dim)
    return mixed.transpose(2, 0, 1, 3).astype(q.dtype)
