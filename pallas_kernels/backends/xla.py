"""Attention in plain XLA, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax

from pallas_kernels import attention_xla
from pallas_kernels.backends.base import Pool, Spec
from pallas_kernels.layout import Ragged
from pallas_kernels.rope import Turn


def supports(spec: Spec) -> str | None:
    """It runs everywhere."""
    return None


def make(spec: Spec | None, decode: bool) -> XlaAttention:
    """`spec` makes no difference."""
    return XlaAttention(decode)


@dataclass(frozen=True)
class XlaAttention:
    decode: bool
    mesh: ClassVar[None] = None

    def plan(self, ragged: Ragged) -> Ragged:
        """Nothing to plan: loops over pages end where the contexts do."""
        return ragged

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        turn: Turn | None,
        pool: Pool,
        work: Ragged,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> tuple[jax.Array, Pool]:
        q, k_pool, v_pool = attention_xla.rope_and_write_xla(q, k, v, turn, *pool, work)
        mixed = attention_xla.paged_attention(
            q, k_pool, v_pool, work, scale=scale, decode=self.decode, window=window, softcap=softcap
        )
        return mixed, (k_pool, v_pool)
