"""Ragged paged attention in plain XLA, for CPU and as the fallback on any device.

    out[t, h] = sum_j softmax_j(cap(scale * q[t, h] . k[j, h // G])) v[j, h // G],  cap(x) = softcap * tanh(x / softcap)

over the keys j of t's own row with positions[t] - window < j <= positions[t], so a window of w sees
w keys.

Keys and values are read from the pages of the row's block table, so the step's KV write comes
first. Pages a chunk or more below every window are not read. A quantized pool (fp8 e4m3, int8)
comes with its `Scales`. Softmax is online over chunks of pages, so temporaries are bounded by the
chunk and not by the context. State and sums are float32. Padding tokens, and rows whose context is
0, give zeros and an lse of MASKED.

A row gets the same bits alone and beside other rows, in programs of the same shape: a chunk in
which a query sees nothing leaves its state unchanged, bit for bit, so a row does not depend on how
far its neighbors reach.

Letters: T tokens, S rows, P pages per row, N pages in the pool, B page size, H query heads, K kv
heads, G = H / K queries per kv head, D head dim, C tokens in a chunk of pages, Q tokens in a query
block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Required, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import MASKED, Ragged, Scales

Parts = tuple[jax.Array, ...]  # mixed values, and lse if requested


@dataclass(frozen=True)
class Rule:
    """How scores are capped and masked, and which results to return."""

    window: int | None = None  # maximum number of keys a query sees, its own included
    softcap: float | None = None
    v_scale: jax.Array | None = None  # [K] float32, scales of a quantized pool's values
    lse: bool = False

    def begin(self, position: jax.Array) -> jax.Array:
        """Return the first key that a query at `position` sees."""
        return jnp.zeros_like(position) if self.window is None else jnp.maximum(position + 1 - self.window, 0)


class Running(NamedTuple):
    """Online softmax so far: highest score, sum of weights, weighted sum of values."""

    peak: jax.Array  # [..., rows]
    total: jax.Array  # [..., rows]
    mixed: jax.Array  # [..., rows, D]


def begin(shape: tuple[int, ...], dim: int) -> Running:
    """Return the state before any key was seen."""
    zeros = jnp.zeros(shape, jnp.float32)
    return Running(zeros + MASKED, zeros, jnp.zeros((*shape, dim), jnp.float32))


def absorb(
    state: Running, score: jax.Array, seen: jax.Array, mix: Callable[[jax.Array], jax.Array], softcap: float | None
) -> Running:
    """Add a chunk: score [..., rows, C], `seen` broadcast to it, and `mix` from weights to [..., rows, D]."""
    if softcap is not None:
        score = softcap * jnp.tanh(score / softcap)
    score = jnp.where(seen, score, MASKED)
    peak = jnp.maximum(state.peak, jnp.max(score, axis=-1))
    # If no key was seen yet, the peak is MASKED itself; relative to half of it, masked scores get weight 0.
    weight = jnp.exp(score - jnp.maximum(peak, MASKED / 2)[..., None])
    fade = jnp.exp(state.peak - peak)
    return Running(peak, state.total * fade + jnp.sum(weight, axis=-1), state.mixed * fade[..., None] + mix(weight))


def mean(state: Running) -> jax.Array:
    """Return the weighted mean of the values, or zeros if no key was seen."""
    return state.mixed / jnp.maximum(state.total, 1e-30)[..., None]


def lse(state: Running) -> jax.Array:
    """Return log sum exp(score), or MASKED if no key was seen; otherwise the total is at least 1."""
    return jnp.where(state.total > 0, state.peak + jnp.log(jnp.maximum(state.total, 1e-30)), MASKED)


@dataclass(frozen=True)
class Pages:
    """Keys and values of one layer: pools [N, B, K, D], or [N, K, B, D] with heads first."""

    k: jax.Array
    v: jax.Array
    heads_first: bool

    @property
    def letters(self) -> str:
        """The letters of the pools' shape."""
        return "[N, K, B, D]" if self.heads_first else "[N, B, K, D]"

    @property
    def size(self) -> int:
        """B, the page size."""
        return int(self.k.shape[2 if self.heads_first else 1])

    @property
    def heads(self) -> int:
        """K, the number of kv heads."""
        return int(self.k.shape[1 if self.heads_first else 2])

    def read(self, ids: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Gather whole pages `ids` [..., c] as keys and values [..., c * B, K, D], or heads first [..., K, c * B, D].

        One gather each, of long contiguous slices.
        """
        *rows, count = ids.shape
        merged = (self.heads, count * self.size) if self.heads_first else (count * self.size, self.heads)
        places = (0, 2, 3) if self.heads_first else (1, 2, 3)  # positions of a page's axes in the result, after `rows`
        dims = lax.GatherDimensionNumbers(
            offset_dims=tuple(len(rows) + place for place in places), collapsed_slice_dims=(0,), start_index_map=(0,)
        )

        def taken(pool: jax.Array) -> jax.Array:
            gathered = lax.gather(pool, ids[..., None], dims, (1, *pool.shape[1:]), mode="clip")
            return gathered.reshape(*rows, *merged, pool.shape[3]).astype(dtype)

        return taken(self.k), taken(self.v)


def missing(columns: int, pages: int) -> int:
    """Return how many columns to add to a block table so that it has at least two chunks.

    With a single chunk, XLA knows what every iteration reads: on CPU it hoists the gather out of
    the loop and copies the whole pool for it, which takes a second for 2 GiB.
    """
    return max(2 * pages - columns, -columns % pages)


CHUNK_BYTES = 512 * 1024  # keys of one chunk over its rows; fits the cache of a core
ROWS = 16  # single-token rows computed together
product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def single(q: jax.Array, pool: Pages, contexts: jax.Array, tables: jax.Array, rule: Rule) -> Parts:
    """Compute rows of one query, q [S, K, G, D], in groups of similar context; a group reads as far as its longest."""
    rows = q.shape[0]
    if rows <= ROWS:
        return _together(q, pool, contexts, tables, rule)
    order = jnp.argsort(-contexts)  # longest first
    count = -(-rows // ROWS)
    # Rows that pad the last group have a context of 0: they read nothing and are not stored.
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
    """Compute rows of one query, all S together, reading as far as the longest context."""
    rows, kv_heads, group, dim = q.shape
    size, way = pool.size, _by_head(q) if pool.heads_first else _by_token(q)
    row_bytes = rows * size * kv_heads * dim * pool.k.dtype.itemsize
    pages = min(max(1, CHUNK_BYTES // row_bytes), max(1, 256 // size), tables.shape[1])  # per row and chunk
    span = pages * size  # C
    tables = jnp.pad(tables, ((0, 0), (0, missing(tables.shape[1], pages))))
    lowest = rule.begin(contexts - 1)  # [S]
    first = lowest // span  # chunk boundaries are fixed, so the bits do not depend on where the window starts

    def chunk(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the pages [S, pages] of each row's i-th chunk, and the positions [S, C] or [1, C] of its keys."""
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
        # Unwritten keys may be NaN, and 0 * NaN is NaN.
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
    """How queries are multiplied by a chunk's keys and values."""

    score: Callable[[jax.Array], jax.Array]  # keys -> [S, H, C]
    mix: Callable[[jax.Array, jax.Array], jax.Array]  # weights [S, H, C] and values -> [S, H, columns]
    own: Callable[[jax.Array], jax.Array]  # mixed [S, H, columns] -> [S, K, G, D]
    columns: int


def _by_head(q: jax.Array) -> _Way:
    """Multiply per head: keys and values [S, K, C, D]."""
    rows, kv_heads, group, dim = q.shape

    def score(k: jax.Array) -> jax.Array:
        # With the keys on the left, a CPU reads them contiguously.
        return product("skcd,skgd->skcg", k, q).swapaxes(2, 3).reshape(rows, kv_heads * group, -1)

    def mix(weight: jax.Array, v: jax.Array) -> jax.Array:
        grouped = weight.reshape(rows, kv_heads, group, -1)
        return product("skgc,skcd->skgd", grouped, v).reshape(rows, kv_heads * group, dim)

    return _Way(score, mix, lambda mixed: mixed.reshape(q.shape), dim)


def _by_token(q: jax.Array) -> _Way:
    """Multiply whole tokens [K * D] of keys and values [S, C, K, D], in the layout of the pages.

    Queries are expanded block-diagonally over the kv heads, and each query keeps its own head's
    columns of the mixed values. That is K times the arithmetic, but one plain matrix product per
    row and chunk. Products per head would first transpose the keys, and sums of products are not
    vectorized over D.
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


class Tile(NamedTuple):
    """The sizes of one block of the computation of a row."""

    queries: int  # Q
    keys: int  # maximum C


# A CPU multiplies large matrices faster, but a short row would leave most of a large tile empty.
LARGE, SMALL = Tile(256, 256), Tile(64, 128)


def many(q: jax.Array, pool: Pages, ragged: Ragged, rule: Rule, queries: int | None) -> Parts:
    """Compute rows of any length, q [T, K, G, D]; no row has more than `queries` tokens, if given."""
    tokens, rows = q.shape[0], ragged.starts.shape[0]
    alone = ragged.lengths == 1  # [S]
    first = jnp.clip(ragged.starts, 0, tokens - 1)
    contexts = jnp.where(alone, ragged.contexts, 0)
    ones = single(q[first], pool, contexts, ragged.block_tables, rule)  # [S, ...] each
    place = jnp.where(alone, first, tokens)
    longest = min(tokens, queries or tokens)
    small = SMALL._replace(queries=min(SMALL.queries, longest))
    spare = LARGE.queries if longest > 2 * SMALL.queries else small.queries
    # A block may reach past the end of its row and of all tokens: padded here, masked when stored.
    padded = jnp.pad(q, ((0, spare), (0, 0), (0, 0), (0, 0)))
    out = tuple(
        jnp.full((tokens + spare, *part.shape[1:]), empty, part.dtype).at[place].set(part, mode="drop")
        for part, empty in zip(ones, (0, MASKED), strict=False)
    )

    def row(r: jax.Array, out: Parts) -> Parts:
        start, length, table = ragged.starts[r], ragged.lengths[r], ragged.block_tables[r]
        offset = ragged.contexts[r] - length  # position of the row's first token

        def blocks(tile: Tile, first: jax.Array | int, count: jax.Array, out: Parts) -> Parts:
            """Compute `count` blocks of the row from its token `first` on."""

            def block(b: jax.Array, out: Parts) -> Parts:
                token = first + b * tile.queries
                here = lax.dynamic_slice_in_dim(padded, start + token, tile.queries)  # [Q, K, G, D]
                mine = token + jnp.arange(tile.queries) < length
                fresh = attend_block(here, pool, table, offset + token, ragged.contexts[r], rule, tile.keys)
                return tuple(_stored(old, new, start + token, mine) for old, new in zip(out, fresh, strict=True))

            filled: Parts = lax.fori_loop(0, count, block, out)
            return filled

        done: jax.Array | int = 0
        if spare == LARGE.queries:  # whole large blocks, and one more for a rest of more than two small blocks
            large = (length + LARGE.queries - 2 * SMALL.queries - 1) // LARGE.queries
            out, done = blocks(LARGE, 0, large, out), jnp.minimum(large * LARGE.queries, length)
        rest = jnp.where(length > 1, length - done, 0)
        return blocks(small, done, (rest + small.queries - 1) // small.queries, out)

    whole: Parts = lax.fori_loop(0, rows, row, out)
    return tuple(part[:tokens] for part in whole)


def _stored(old: jax.Array, new: jax.Array, at: jax.Array, mine: jax.Array) -> jax.Array:
    """Write the tokens of new [Q, ...] where `mine` is true into old [T, ...] at `at`."""
    before = lax.dynamic_slice_in_dim(old, at, new.shape[0])
    kept = jnp.where(mine.reshape(-1, *(1,) * (new.ndim - 1)), new, before)
    return lax.dynamic_update_slice_in_dim(old, kept, at, axis=0)


def attend_block(
    q: jax.Array, pool: Pages, table: jax.Array, position: jax.Array, context: jax.Array, rule: Rule, keys: int
) -> Parts:
    """Compute a query block [Q, K, G, D] of one row from `position` on, `keys` keys at a time."""
    block, kv_heads, group, dim = q.shape
    pages = min(max(1, keys // pool.size), table.shape[0])
    span = pages * pool.size  # C
    table = jnp.pad(table, (0, missing(table.shape[0], pages)))
    stacked = q.transpose(1, 2, 0, 3).reshape(kv_heads, group * block, dim)  # one matrix product per kv head
    last = jnp.tile(position + jnp.arange(block), group)[:, None]  # [G * Q, 1], each query's own position
    lowest = rule.begin(position)

    def body(i: jax.Array, state: Running) -> Running:
        ids = lax.dynamic_slice_in_dim(table, i * pages, pages)
        k, v = pool.read(ids, q.dtype)  # [C, K, D], or [K, C, D]
        key = i * span + jnp.arange(span)  # [C] positions
        real = key < context  # [C]
        seen = (key[None, :] <= last) & real[None, :]  # [G * Q, C]
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


class Options(TypedDict, total=False):
    """The options of `paged_attention`.

    `decode` promises that token i is all of row i (T = S, lengths 0 or 1), and skips the general
    case. `queries` promises that no row has more tokens than that: verifying rows of 4 tokens is
    four times as fast with it.
    """

    scale: Required[float]
    window: int | None
    softcap: float | None
    scales: Scales | None
    decode: bool
    queries: int | None
    heads_first: bool


def paged_attention(
    q: jax.Array,  # [T, H, D]
    k_pool: jax.Array,  # [N, B, K, D], or [N, K, B, D] if `heads_first`
    v_pool: jax.Array,  # as k_pool
    ragged: Ragged,
    **options: Unpack[Options],
) -> jax.Array:
    """Attend from every token to its own row's pages, causally; [T, H, D] in the dtype of q."""
    return _attended(q, k_pool, v_pool, ragged, False, **options)[0]


def paged_attention_lse(
    q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, ragged: Ragged, **options: Unpack[Options]
) -> tuple[jax.Array, jax.Array]:
    """Attend as `paged_attention` does, and also return lse [T, H] float32."""
    mixed, sums = _attended(q, k_pool, v_pool, ragged, True, **options)
    return mixed, sums


def _attended(
    q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, ragged: Ragged, lse: bool, **options: Unpack[Options]
) -> Parts:
    pages, scales = Pages(k_pool, v_pool, options.get("heads_first", False)), options.get("scales")
    decode = options.get("decode", False)
    _check(q, pages, ragged, decode)
    grouped = scaled(q, pages.heads, options["scale"], scales)
    rule = Rule(options.get("window"), options.get("softcap"), None if scales is None else scales.v, lse)
    if decode:
        parts = single(grouped, pages, ragged.contexts, ragged.block_tables, rule)
    else:
        parts = many(grouped, pages, ragged, rule, options.get("queries"))
    return tuple(part.reshape(shape) for part, shape in zip(parts, (q.shape, q.shape[:2]), strict=False))


def scaled(q: jax.Array, kv_heads: int, scale: float, scales: Scales | None) -> jax.Array:
    """Return q [T, H, D] as [T, K, G, D], times `scale` and the keys' scales."""
    factor = jnp.full((kv_heads,), scale, jnp.float32) if scales is None else scales.k * scale
    grouped = q.reshape(q.shape[0], kv_heads, -1, q.shape[2]).astype(jnp.float32)
    return (grouped * factor[None, :, None, None]).astype(q.dtype)


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
