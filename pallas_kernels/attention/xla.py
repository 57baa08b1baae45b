"""Attention in plain XLA, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax

from pallas_kernels.layout import Ragged, Scales
from pallas_kernels.ops.kv_write.xla import rope_and_write_xla, write_latent
from pallas_kernels.ops.paged_attention.api import Pool, Spec
from pallas_kernels.ops.paged_attention.sinks import with_sinks
from pallas_kernels.ops.paged_attention.xla import paged_attention
from pallas_kernels.rope import Turn, rotate


def supports(spec: Spec) -> str | None:
    """It runs everywhere."""
    return None


def heads_first(spec: Spec) -> bool:
    """Whether pools are [N, K, B, D]: a CPU multiplies by the keys of each head as they lie then, without turning them
    round first. Of a latent there is one head."""
    return spec.platform == "cpu" and not spec.latent


def make(spec: Spec | None, decode: bool, few: bool = False) -> XlaAttention:
    """`few` makes no difference. `spec` None: pools are [N, B, K, D]."""
    return XlaAttention(decode, spec is not None and heads_first(spec))


@dataclass(frozen=True)
class XlaAttention:
    decode: bool
    heads_first: bool = False

    def plan(self, ragged: Ragged) -> Ragged:
        """Nothing to plan: loops over pages end where the contexts do."""
        return ragged

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        turn: Turn | None,
        pool: Pool,
        work: Ragged,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: jax.Array | None = None,
        scales: Scales | None = None,
    ) -> tuple[jax.Array, Pool]:
        q, pool = _written(q, k, v, turn, pool, work, scales, self.heads_first)
        attend = partial(
            paged_attention,
            q, pool[0], pool[-1], work, scale=scale, decode=self.decode, window=window, softcap=softcap,
            scales=scales, heads_first=self.heads_first,
        )  # fmt: skip
        if sinks is None:
            return attend(), pool
        mixed, lse = attend(return_lse=True)
        return with_sinks(mixed, lse, sinks), pool


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
    """Turned queries, and the pool with this step's keys and values, or latents."""
    if v is None:
        return rotate(q, turn), (write_latent(pool[0], rotate(k, turn), ragged.write),)
    k_pool, v_pool = pool
    q, k_pool, v_pool = rope_and_write_xla(
        q, k, v, turn, k_pool, v_pool, ragged, scales=scales, heads_first=heads_first
    )
    return q, (k_pool, v_pool)
