"""Paged attention that reads a prefix shared by several rows once (cascade inference): its plan, and its XLA form.

The keys of a row in a group are split at the end of the shared pages. All queries of the group
attend to these pages together, without a causal mask, since every one of them comes later; then
each row attends to the rest of its own pages. With the log-sum-exps a and b of both parts,

    out = (exp(a) * prefix + exp(b) * rest) / (exp(a) + exp(b)),  lse = log(exp(a) + exp(b))

which equals attention to all keys up to rounding: the sums are added in another order, so the bits
of a row depend on its group. Rows outside of groups keep the bits of plain attention.

A layer with a window hides the beginning of the prefix from contexts longer than the window. Such
rows belong to no group in this layer; for the others the window hides nothing.

Letters: T tokens, S rows, P pages per row, H query heads, K kv heads, D head dim, G groups (in
shapes of queries: H / K), C tokens that groups may have, J tiles of up to Q queries.
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import MASKED, Ragged
from pallas_kernels.ops.paged_attention.xla import Options, Pages, Rule, attend_block, paged_attention_lse, scaled

DECODE_QUERIES, QUERIES = 16, 64  # Q in XLA
KEYS = 256  # keys that a tile reads at a time in XLA


class Cascade(NamedTuple):
    """The work of one step, for the layers with the same window."""

    order: jax.Array  # [C] int32, the tokens of groups, group by group; T for padding
    place: jax.Array  # [T] int32, place of each token in `order`; C for tokens of no group
    # C tokens as rows of Q tokens: those of one group that read its pages together. Used rows come first, others have
    # length 0. Tokens have no position and are not written.
    tiles: Ragged
    used: jax.Array  # [] int32, tiles in use
    rest: Ragged  # the step without the shared pages


def queries(tokens: int, *, decode: bool) -> int:
    """Return Q in XLA."""
    return min(tokens, DECODE_QUERIES if decode else QUERIES)


def plan(ragged: Ragged, *, queries: int, longest: int | None = None, window: int | None = None) -> Cascade:
    """Arrange the queries of each group in tiles of Q = `queries`. `ragged` must have `shared`.

    `longest`: rows of more tokens are in no group.
    """
    shared = ragged.shared
    assert shared is not None, "plain attention needs no plan"
    tokens, rows, groups = ragged.rows.shape[0], ragged.lengths.shape[0], shared.row.shape[0]
    group = shared.group - 1  # [S], -1: none
    if window is not None:
        group = jnp.where(ragged.contexts <= window, group, -1)
    if longest is not None:
        group = jnp.where(ragged.lengths <= longest, group, -1)
    owner = jnp.append(group, -1)[ragged.rows]  # [T]
    # Sums instead of a sort, which takes longer to compile; a step has few groups.
    mine = owner[:, None] == jnp.arange(groups)[None, :]  # [T, G]
    counts = jnp.cumsum(mine, axis=0, dtype=jnp.int32)
    ends, tile_ends = jnp.cumsum(counts[-1]), jnp.cumsum((counts[-1] + queries - 1) // queries)  # [G]
    begins, tile_begins = jnp.append(0, ends[:-1]), jnp.append(0, tile_ends[:-1])

    most = tokens if longest is None else min(tokens, longest * rows)  # C
    place = jnp.sum(jnp.where(mine, begins[None, :] + counts - 1, 0), axis=1)
    place = jnp.where(owner < 0, most, place)
    numbers = jnp.arange(tokens, dtype=jnp.int32)
    order = jnp.full(most, tokens, jnp.int32).at[place].set(numbers, mode="drop")

    tile = jnp.arange(most // queries + groups, dtype=jnp.int32)  # [J]
    theirs = _group_of(tile_ends, tile)
    within = (tile - tile_begins[theirs]) * queries
    left = jnp.where(tile < tile_ends[-1], counts[-1][theirs] - within, 0)
    at = numbers[:most]
    here = _group_of(ends, at)
    tiles = Ragged(
        positions=jnp.zeros_like(at),
        rows=jnp.where(at < ends[-1], tile_begins[here] + (at - begins[here]) // queries, len(tile)),
        write=jnp.zeros_like(at),
        starts=begins[theirs] + within,
        lengths=jnp.clip(left, 0, queries),
        contexts=shared.tokens[theirs],
        block_tables=ragged.block_tables[shared.row[theirs]],
    )
    return Cascade(order, place, tiles, tile_ends[-1], _without(ragged, group))


def _group_of(ends: jax.Array, at: jax.Array) -> jax.Array:
    """Return the group in which `at` is, of groups that end before `ends` [G]; the last one if in none."""
    return jnp.minimum(jnp.sum(ends[None, :] <= at[:, None], axis=1), len(ends) - 1)


def _without(ragged: Ragged, group: jax.Array) -> Ragged:
    """Return the step without the shared pages of the rows in a group [S]; the others' group is -1."""
    shared, columns = ragged.shared, ragged.block_tables.shape[1]
    assert shared is not None, "see `plan`"
    pages = jnp.where(group < 0, 0, shared.pages[jnp.maximum(group, 0)])  # [S]
    tokens = jnp.where(group < 0, 0, shared.tokens[jnp.maximum(group, 0)])
    column = jnp.minimum(pages[:, None] + jnp.arange(columns)[None, :], columns - 1)
    tables = jnp.take_along_axis(ragged.block_tables, column, axis=1)
    return ragged._replace(contexts=ragged.contexts - tokens, block_tables=tables, shared=None)


def cascade_attention(
    q: jax.Array,  # [T, H, D]
    k_pool: jax.Array,  # [N, B, K, D], or [N, K, B, D] if heads_first
    v_pool: jax.Array,  # as k_pool
    work: Cascade,
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]:
    """Attend as `xla.paged_attention` does, up to rounding; return [T, H, D] and lse [T, H]."""
    rest, lse = paged_attention_lse(q, k_pool, v_pool, work.rest, **options)
    pages, scales = Pages(k_pool, v_pool, options.get("heads_first", False)), options.get("scales")
    grouped = scaled(q, pages.heads, options["scale"], scales)  # [T, K, G, D]
    rule = Rule(None, options.get("softcap"), None if scales is None else scales.v, lse=True)

    size = queries(len(q), decode=options.get("decode", False))
    order = jnp.pad(work.order, (0, size), constant_values=len(q))

    def tile(j: jax.Array, parts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        here = lax.dynamic_slice(order, (work.tiles.starts[j],), (size,))
        here = jnp.where(jnp.arange(size) < work.tiles.lengths[j], here, len(q))
        keys = work.tiles.contexts[j]
        asked = jnp.take(grouped, here, axis=0, mode="clip")  # [Q, K, G, D]
        fresh = attend_block(asked, pages, work.tiles.block_tables[j], keys, keys, rule, KEYS)
        mixed, seen = parts
        return mixed.at[here].set(fresh[0], mode="drop"), seen.at[here].set(fresh[1], mode="drop")

    none = jnp.zeros(grouped.shape, q.dtype), jnp.full(grouped.shape[:3], MASKED, jnp.float32)
    mixed, seen = lax.fori_loop(0, work.used, tile, none)
    return merge(mixed.reshape(q.shape), seen.reshape(lse.shape), rest, lse)


def merge(prefix: jax.Array, a: jax.Array, rest: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge attention [T, H, D] to two sets of keys with their lse [T, H]; bits of `rest` where a is MASKED."""
    peak = jnp.maximum(a, b)
    weight, other = jnp.exp(a - peak), jnp.exp(b - peak)
    total = weight + other
    both = (prefix * weight[..., None] + rest * other[..., None]) / total[..., None]
    alone = a <= MASKED
    return jnp.where(alone[..., None], rest, both.astype(rest.dtype)), jnp.where(alone, b, peak + jnp.log(total))
