"""Decode attention from the tokens of a step to its results: rows of products, both kernels, tokens again.

Letters: as in decode.py; R columns of the values, U rows of a product that are in use.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels.hopper.combine import combine
from pallas_kernels.hopper.decode_body import body
from pallas_kernels.hopper.decode_shape import Shape
from pallas_kernels.hopper.fragments import in_order
from pallas_kernels.layout import MASKED, Ragged, Scales
from pallas_kernels.plan.decode import DecodeWork


def attend(
    shape: Shape,
    q: jax.Array,  # [T, H, D]
    pools: tuple[jax.Array, ...],  # of keys and values, or of latents
    ragged: Ragged,
    work: DecodeWork,
    scales: Scales | None,
    *,
    kv_heads: int,  # K; of a latent, groups of its query heads
    blocks: int,
) -> tuple[jax.Array, jax.Array]:
    """Mixed values [T, H, R] in the dtype of q and lse [T, H]; zeros and MASKED for tokens of rows not in `work`."""
    parts = work.row.shape[0] * shape.partials
    run = compat.kernel(
        body(shape),
        out=(
            jax.ShapeDtypeStruct((parts, kv_heads, blocks, shape.rows, shape.values), jnp.float32),
            jax.ShapeDtypeStruct((parts, kv_heads, blocks, shape.rows), jnp.float32),
        ),
        scratch=shape.scratch(),
        # Heads last, which is fastest: blocks that read neighbouring bytes of the same pages run side by side.
        grid=(("worker", work.workers), ("block", blocks), ("head", kv_heads)),
        threads=("role", shape.consumers + 1),
        interpret=shape.interpret,
    )
    planned = work.table, work.row, work.first, work.tiles, work.cuts, ragged.lengths, ragged.contexts
    mixed, weight = run(_pack(q, ragged, shape, kv_heads, blocks), *pools, *planned, *(scales or ()))
    out, lse = combine(
        mixed.reshape(parts, kv_heads * blocks, shape.rows, shape.values),
        weight.reshape(parts, kv_heads * blocks, shape.rows),
        work.begins * shape.partials,
        work.splits * shape.partials,
        used=shape.block * shape.group,
        dtype=q.dtype,
        interpret=shape.interpret,
    )
    if shape.parted:
        out = in_order(out, shape.width)
    return _unpack(out, lse, ragged, work, shape, kv_heads)


def _pack(q: jax.Array, ragged: Ragged, shape: Shape, kv_heads: int, blocks: int) -> jax.Array:
    """q [T, H, D] by rows, as the products want it: [S, K, blocks, packed, D], query token major, G minor."""
    token = ragged.starts[:, None] + jnp.arange(blocks * shape.block)[None]
    got = jnp.take(q, token, axis=0, mode="clip").astype(shape.dtype)  # [S, blocks * block, H, D]
    split = got.reshape(-1, blocks, shape.block, kv_heads, shape.group, shape.dim)
    split = split.transpose(0, 3, 1, 2, 4, 5).reshape(-1, kv_heads, blocks, shape.block * shape.group, shape.dim)
    return jnp.pad(split, ((0, 0), (0, 0), (0, 0), (0, shape.packed - split.shape[3]), (0, 0)))


def _unpack(
    out: jax.Array, lse: jax.Array, ragged: Ragged, work: DecodeWork, shape: Shape, kv_heads: int
) -> tuple[jax.Array, jax.Array]:
    """By tokens again: out [S, K * blocks, U, D] -> [T, H, D], lse -> [T, H]; zeros and MASKED where not in `work`."""
    rows = out.shape[0]
    row = jnp.minimum(ragged.rows, rows - 1)  # [T]
    mine = (ragged.rows < rows) & (work.splits[row] > 0)
    token = jnp.where(mine, jnp.arange(len(row)) - ragged.starts[row], 0)

    def take(x: jax.Array) -> jax.Array:
        used = x[:, :, : shape.block * shape.group].reshape(rows, kv_heads, -1, shape.block, shape.group, *x.shape[3:])
        return jnp.moveaxis(used, 1, 3)[row, token // shape.block, token % shape.block].reshape(
            len(row), -1, *x.shape[3:]
        )

    return jnp.where(mine[:, None, None], take(out), 0), jnp.where(mine[:, None], take(lse), MASKED)
