"""Attention in plain XLA, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax

from pallas_kernels.choice import anywhere
from pallas_kernels.layout import Ragged
from pallas_kernels.ops.kv_write.xla import write_kv, write_latent
from pallas_kernels.ops.paged_attention import cascade
from pallas_kernels.ops.paged_attention.api import AttentionInputs, AttentionSpec, Pool
from pallas_kernels.ops.paged_attention.sinks import with_sinks
from pallas_kernels.ops.paged_attention.xla import Options, paged_attention, paged_attention_lse
from pallas_kernels.rope import rotate

supports = anywhere


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

    def __call__(self, inputs: AttentionInputs, pool: Pool, work: XlaWork) -> tuple[jax.Array, Pool]:
        q, k = rotate(inputs.q, inputs.turn), rotate(inputs.k, inputs.turn)
        if inputs.v is None:
            pool = (write_latent(pool[0], k, work.ragged.write),)
        else:
            k_pool, v_pool = pool
            pool = write_kv(k_pool, v_pool, k, inputs.v, work.ragged, inputs.scales, self.heads_first)
        return self.attend(q, pool, work, inputs), pool

    def attend(self, q: jax.Array, pool: Pool, work: XlaWork, inputs: AttentionInputs) -> jax.Array:
        """Return the mixed values of rotated queries q; the pool holds the step's keys and values."""
        options = Options(**inputs.options, decode=self.decode, queries=None, heads_first=self.heads_first)
        if work.cascades:
            shared = work.cascades[self.windows.index(inputs.window)]
            mixed, lse = cascade.cascade_attention(q, pool[0], pool[-1], shared, **options)
        elif inputs.sinks is None:
            return paged_attention(q, pool[0], pool[-1], work.ragged, **options)
        else:
            mixed, lse = paged_attention_lse(q, pool[0], pool[-1], work.ragged, **options)
        return mixed if inputs.sinks is None else with_sinks(mixed, lse, inputs.sinks)
