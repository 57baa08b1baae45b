"""Paged attention in XLA that reads a prefix shared by several rows once (cascade inference).

The keys of a row in a group are split at the end of the shared pages. All queries of the group
attend to these pages together, without a causal mask, since every one of them comes later; then
each row attends to the rest of its own pages. With the log-sum-exps a and b of both parts,

    out = (exp(a) * prefix + exp(b) * rest) / (exp(a) + exp(b)),  lse = log(exp(a) + exp(b))

which equals attention to all keys up to rounding: the sums are added in another order, so the bits
of a row depend on its group. Rows outside of groups keep the bits of plain attention.

A layer with a window hides the beginning of the prefix from contexts longer than the window. Such
rows belong to no group in this layer; for the others the window hides nothing.

Letters: T tokens, S rows, P pages per row, H query heads, K kv heads, D head dim, G groups (in
shapes of queries: H / K), J tiles of Q queries.
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import MASKED, Ragged, SharedPrefixes
from pallas_kernels.ops.paged_attention.xla import Options, Pages, Rule, attend_block, paged_attention, scaled

DECODE_QUERIES, QUERIES = 16, 64  # Q: at most that many queries of one group attend together
KEYS = 256  # keys that a tile reads at a time


class Cascade(NamedTuple):
    """The work of one step, for the layers with the same window."""

    queries: jax.Array  # [J, Q] int32, tokens of the tile's queries; T for padding
    row: jax.Array  # [J] int32, row whose block table the tile reads
    keys: jax.Array  # [J] int32, keys that it reads
    used: jax.Array  # [] int32, tiles in use, which come first
    tables: jax.Array  # [S, P] int32, the step's block tables
    rest: Ragged  # the step without the shared pages


def plan(ragged: Ragged, *, decode: bool, window: int | None = None) -> Cascade:
    """Arrange the queries of each group in tiles. `ragged` must have `shared`."""
    shared: SharedPrefixes = ragged.shared
    tokens, groups = ragged.rows.shape[0], shared.row.shape[0]
    size = min(tokens, DECODE_QUERIES if decode else QUERIES)
    group = shared.group - 1  # [S], -1: none
    if window is not None:
        group = jnp.where(ragged.contexts <= window, group, -1)
    owner = jnp.append(group, -1)[ragged.rows]  # [T]
    # Sums instead of a sort, which takes longer to compile; a step has few groups.
    mine = owner[:, None] == jnp.arange(groups)[None, :]  # [T, G]
    counts = jnp.cumsum(mine, axis=0, dtype=jnp.int32)
    ends = jnp.cumsum((counts[-1] + size - 1) // size)  # [G] tiles
    begins = jnp.append(0, ends[:-1]) * size
    most = tokens // size + groups  # J
    place = jnp.sum(jnp.where(mine, begins[None, :] + counts - 1, 0), axis=1)
    place = jnp.where(owner < 0, most * size, place)
    queries = jnp.full(most * size, tokens, jnp.int32).at[place].set(jnp.arange(tokens, dtype=jnp.int32), mode="drop")
    tile = jnp.sum(ends[None, :] <= jnp.arange(most)[:, None], axis=1)  # [J] group
    tile = jnp.minimum(tile, groups - 1)
    rest = _without(ragged, group)
    return Cascade(
        queries.reshape(most, size), shared.row[tile], shared.tokens[tile], ends[-1], ragged.block_tables, rest
    )


def _without(ragged: Ragged, group: jax.Array) -> Ragged:
    """Return the step without the shared pages of the rows in a group [S]; the others' group is -1."""
    shared: SharedPrefixes = ragged.shared
    columns = ragged.block_tables.shape[1]
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
    rest, lse = paged_attention(q, k_pool, v_pool, work.rest, return_lse=True, **options)
    pages, scales = Pages(k_pool, v_pool, options.get("heads_first", False)), options.get("scales")
    grouped = scaled(q, pages.heads, options["scale"], scales)  # [T, K, G, D]
    rule = Rule(None, options.get("softcap"), None if scales is None else scales.v, lse=True)

    def tile(j: jax.Array, parts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        queries, keys = work.queries[j], work.keys[j]
        here = jnp.take(grouped, queries, axis=0, mode="clip")  # [Q, K, G, D]
        table = work.tables[work.row[j]]
        fresh = attend_block(here, pages, table, keys, keys, rule, KEYS)
        mixed, seen = parts
        return mixed.at[queries].set(fresh[0], mode="drop"), seen.at[queries].set(fresh[1], mode="drop")

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
