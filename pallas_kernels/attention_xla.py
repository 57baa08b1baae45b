"""Ragged paged attention in plain XLA: for CPU, and the fallback anywhere.

    out[t, h] = sum_j softmax_j(cap(scale * q[t, h] . k[j, h // G])) v[j, h // G],  cap(x) = softcap * tanh(x / softcap)

over the keys j of t's own row with positions[t] - window < j <= positions[t]: a window of w sees w keys.

Keys and values are read from the pages of the row's block table, so `write_kv` of the same step comes first. Pages
that lie a chunk or more below every window are not read. A quantised pool (fp8 e4m3, int8) comes with its `Scales`.
Softmax is online over chunks of pages: temporaries are bounded by the chunk, whatever the context. Sums are
float32. Padding tokens, and rows whose context is 0, give zeros, and an lse of MASKED.

A row gets the same bits alone and beside others, in programs of one shape.

Letters: T tokens, S rows, P pages per row, N pages in the pool, B page size, H query heads, K kv heads,
G = H / K queries per kv head, D head dim, C = tokens in a chunk of pages, Q = tokens in a query block.
"""

from __future__ import annotations

from typing import Literal, Required, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp

from pallas_kernels.layout import MASKED, Ragged, Scales
from pallas_kernels.xla.common import Pages, Rule
from pallas_kernels.xla.rows import many
from pallas_kernels.xla.single import single
from pallas_kernels.xla.write import rope_and_write_xla, write_kv

__all__ = ["MASKED", "paged_attention", "rope_and_write_xla", "write_kv"]


class Options(TypedDict, total=False):
    """Arguments of `paged_attention` by name, for the overloads."""

    scale: Required[float]
    decode: bool
    queries: int | None
    window: int | None
    softcap: float | None
    scales: Scales | None
    heads_first: bool


@overload
def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    ragged: Ragged,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> jax.Array: ...


@overload
def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    ragged: Ragged,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...


def paged_attention(
    q: jax.Array,  # [T, H, D]
    k_pool: jax.Array,  # [N, B, K, D], or [N, K, B, D] with heads first
    v_pool: jax.Array,  # the same
    ragged: Ragged,
    *,
    scale: float,
    decode: bool = False,
    queries: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scales: Scales | None = None,
    heads_first: bool = False,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Causal attention of every token to its own row's pages; [T, H, D] in the dtype of `q`, and lse [T, H] float32.

    `decode=True` promises that token i is all of row i (T = S, lengths 0 or 1), and skips the general case.
    `queries` promises that no row has more tokens: verify rows of 4 tokens are four times as fast with it.
    """
    pages = Pages(k_pool, v_pool, heads_first)
    _check(q, pages, ragged, decode)
    tokens, heads, dim = q.shape
    kv_heads = pages.heads
    factor = jnp.full((kv_heads,), scale, jnp.float32) if scales is None else scales.k * scale
    grouped = q.reshape(tokens, kv_heads, -1, dim).astype(jnp.float32) * factor[None, :, None, None]
    grouped = grouped.astype(q.dtype)  # [T, K, G, D]
    rule = Rule(window, softcap, None if scales is None else scales.v, return_lse)
    if decode:
        parts = single(grouped, pages, ragged.contexts, ragged.block_tables, rule)
    else:
        parts = many(grouped, pages, ragged, rule, queries)
    out = parts[0].reshape(q.shape)
    return (out, parts[1].reshape(tokens, heads)) if return_lse else out


def _check(q: jax.Array, pages: Pages, ragged: Ragged, decode: bool) -> None:
    shape = pages.k.shape
    if q.ndim != 3 or len(shape) != 4 or shape != pages.v.shape:
        raise ValueError(f"q [T, H, D] is {q.shape}; pools {pages.letters} are {shape} and {pages.v.shape}")
    if q.shape[2] != shape[3] or q.shape[1] % pages.heads:
        raise ValueError(
            f"q.shape={q.shape} [T, H, D] must fit pools {pages.letters} {shape}: equal D, H a multiple of K"
        )
    rows = ragged.block_tables.shape[0]
    if decode and q.shape[0] != rows:
        raise ValueError(f"decode=True needs one token per row; there are {q.shape[0]} tokens and {rows} rows")
