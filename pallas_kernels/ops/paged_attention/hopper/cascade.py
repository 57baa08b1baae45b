"""Attention of groups of rows to the pages that they share, on Hopper: a launch of decode without a causal mask.

Queries of a group are gathered side by side, and each tile of them is a row of up to 16 tokens of
the decode kernel, so they fill the rows of a product and each key is read once a tile. A row of more
tokens fills tiles of its own, so reading its prefix with others would save nothing: it is in no
group. A step without groups has no tile, and workers without items end at once.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.layout import MASKED, Ragged, Scales
from pallas_kernels.mosaic.interpret import Interpret
from pallas_kernels.ops.paged_attention import cascade
from pallas_kernels.ops.paged_attention.cascade import Cascade
from pallas_kernels.ops.paged_attention.hopper.decode import Config, paged_decode
from pallas_kernels.ops.paged_attention.plan import DecodeWork


class Groups(NamedTuple):
    """The work of one step, for the layers with the same window."""

    cascade: Cascade
    shared: DecodeWork  # of `cascade.tiles`


def plan(ragged: Ragged, config: Config, *, page: int, window: int | None = None) -> Groups:
    """Plan a step with `ragged.shared`; all layers of one window share it."""
    work = cascade.plan(ragged, queries=config.queries, longest=config.queries, window=window)
    return Groups(work, config.plan(work.tiles, page=page))


def attend_shared(
    q: jax.Array,  # [T, H, D]
    k_pool: jax.Array,  # [N, B, K, D]
    v_pool: jax.Array,  # [N, B, K, D]
    groups: Groups,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    scales: Scales | None = None,
    config: Config,
    interpret: Interpret = None,
) -> tuple[jax.Array, jax.Array]:
    """Return what tokens of groups mix of the shared pages, [T, H, D], and lse [T, H]; others: arbitrary and MASKED.

    `groups` is `plan(ragged, config, page=B, window=window)`; its rows see all shared pages in spite
    of the window.
    """
    order, place, tiles, *_ = groups.cascade
    mixed, lse = paged_decode(
        jnp.take(q, order, axis=0, mode="clip"), k_pool, v_pool, tiles, groups.shared, scale=scale, softcap=softcap,
        scales=scales, config=config, interpret=interpret, clean=False, causal=False,
    )  # fmt: skip
    mine = (place < len(order))[:, None]
    return (
        jnp.take(mixed, place, axis=0, mode="clip"),
        jnp.where(mine, jnp.take(lse, place, axis=0, mode="clip"), MASKED),
    )
