"""Choose an attention implementation for a mesh, and keep it local to each shard's heads."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import attention_xla
from pallas_kernels.layout import Ragged

Pool = tuple[jax.Array, jax.Array]  # keys and values of one layer, each [N, B, K, D]

IMPLEMENTATIONS = ("xla",)


class Attention(Protocol):
    """Write this step's keys and values, then attend."""

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, pool: Pool, ragged: Ragged, *, scale: float
    ) -> tuple[jax.Array, Pool]:
        """q [T, H, D], k and v [T, K, D] -> mixed values [T, H, D] and the pool with k, v in it."""


def attention(mesh: Mesh | AbstractMesh | None = None, *, impl: str = "auto", decode: bool = False) -> Attention:
    """The attention of one instance's programs.

    `mesh` with an axis `tp`: heads are split over it and every shard attends to its own pool; None: one device.
    `decode`: every program row is exactly one token (see `attention_xla.paged_attention`).
    """
    if impl not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"attention {impl=} is unknown; there are: auto, {', '.join(IMPLEMENTATIONS)}")
    local = partial(_xla, decode=decode)
    if mesh is None or mesh.shape["tp"] == 1:
        return local
    return partial(_sharded, local=local, mesh=mesh)


def _xla(
    q: jax.Array, k: jax.Array, v: jax.Array, pool: Pool, ragged: Ragged, *, scale: float, decode: bool
) -> tuple[jax.Array, Pool]:
    pool = attention_xla.write_kv(*pool, k, v, ragged)
    return attention_xla.paged_attention(q, *pool, ragged, scale=scale, decode=decode), pool


def _sharded(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: Pool,
    ragged: Ragged,
    *,
    scale: float,
    local: Attention,
    mesh: Mesh | AbstractMesh,
) -> tuple[jax.Array, Pool]:
    heads, pages = P(None, "tp"), P(None, None, "tp")
    # Replication is not checked: the loops over pages have trip counts that depend on replicated arrays only.
    run = jax.shard_map(
        partial(local, scale=scale),
        mesh=mesh,
        in_specs=(heads, heads, heads, (pages, pages), P()),
        out_specs=(heads, (pages, pages)),
        check_vma=False,
    )
    mixed, pool = run(q, k, v, pool, ragged)
    return mixed, pool
