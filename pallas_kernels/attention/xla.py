"""Attention in plain XLA, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Unpack

import jax

from pallas_kernels.layout import Ragged, Scales
from pallas_kernels.norms import HeadNorms
from pallas_kernels.ops.kv_write.xla import rope_and_write_xla, write_latent
from pallas_kernels.ops.paged_attention import cascade
from pallas_kernels.ops.paged_attention.api import AttentionSpec, Pool
from pallas_kernels.ops.paged_attention.sinks import with_sinks
from pallas_kernels.ops.paged_attention.xla import Options, paged_attention
from pallas_kernels.rope import Turn, rotate


def supports(spec: AttentionSpec) -> str | None:
    """Return None: XLA runs everywhere."""
    return None


def heads_first(spec: AttentionSpec) -> bool:
    """Return whether pools are [N, K, B, D].

    On a CPU, the keys of one head are then contiguous and need no transpose before the product. A
    latent cache has one head.
    """
    return spec.platform == "cpu" and not spec.latent


def make(spec: AttentionSpec | None, decode: bool, few: bool = False) -> XlaAttention:
    """Build the attention of a bucket; `few` is ignored. Without a `spec`, pools are [N, B, K, D]."""
    return XlaAttention(decode) if spec is None else XlaAttention(decode, heads_first(spec), spec.windows)


class XlaWork(NamedTuple):
    """What the layers of a step share."""

    ragged: Ragged
    cascades: tuple[cascade.Cascade, ...]  # one per distinct window; empty if the step has no `Ragged.shared`


@dataclass(frozen=True)
class XlaAttention:
    """Attention of one bucket in plain XLA."""

    decode: bool
    heads_first: bool = False
    windows: tuple[int | None, ...] = (None,)  # distinct windows of the model's layers

    def plan(self, ragged: Ragged) -> XlaWork:
        """Plan what rows read together, once per distinct window; the loops over pages need no plan."""
        if ragged.shared is None:
            return XlaWork(ragged, ())
        size = cascade.queries(len(ragged.rows), decode=self.decode)
        return XlaWork(ragged, tuple(cascade.plan(ragged, queries=size, window=each) for each in self.windows))

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        turn: Turn | None,
        pool: Pool,
        work: XlaWork,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: jax.Array | None = None,
        scales: Scales | None = None,
        qkv: jax.Array | None = None,
        norms: HeadNorms | None = None,
    ) -> tuple[jax.Array, Pool]:
        q, pool = _written(q, k, v, turn, pool, work.ragged, scales, self.heads_first)
        return self.attend(q, pool, work, sinks, scale=scale, window=window, softcap=softcap, scales=scales), pool

    def attend(
        self, q: jax.Array, pool: Pool, work: XlaWork, sinks: jax.Array | None, **options: Unpack[Options]
    ) -> jax.Array:
        """Return the mixed values of rotated queries; the pool holds the step's keys and values."""
        options = {**options, "decode": self.decode, "heads_first": self.heads_first}
        if work.cascades:
            shared = work.cascades[self.windows.index(options["window"])]
            mixed, lse = cascade.cascade_attention(q, pool[0], pool[-1], shared, **options)
        elif sinks is None:
            return paged_attention(q, pool[0], pool[-1], work.ragged, **options)
        else:
            mixed, lse = paged_attention(q, pool[0], pool[-1], work.ragged, return_lse=True, **options)
        return mixed if sinks is None else with_sinks(mixed, lse, sinks)


def _written(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    turn: Turn | None,
    pool: Pool,
    ragged: Ragged,
    scales: Scales | None,
    heads_first: bool,
) -> tuple[jax.Array, Pool]:
    """Return the rotated queries, and the pool with this step's keys and values, or latents, written."""
    if v is None:
        return rotate(q, turn), (write_latent(pool[0], rotate(k, turn), ragged.write),)
    k_pool, v_pool = pool
    q, k_pool, v_pool = rope_and_write_xla(
        q, k, v, turn, k_pool, v_pool, ragged, scales=scales, heads_first=heads_first
    )
    return q, (k_pool, v_pool)
