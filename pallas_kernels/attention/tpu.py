"""Attention on TPU by Mosaic kernels: RoPE by XLA, then KV write, decode and prefill, merged by token.

Rows of up to QUERIES tokens are computed by the decode plan, longer rows by the prefill plan; each
row is in exactly one of them. Windows need no plans of their own: a work item skips the pages that
its window hides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.layout import Ragged
from pallas_kernels.ops.kv_write.xla import quantized
from pallas_kernels.ops.paged_attention.api import AttentionInputs, AttentionSpec, Pool
from pallas_kernels.ops.paged_attention.sinks import with_sinks
from pallas_kernels.rope import rotate

QUERIES = 16  # tokens of the longest row that the decode plan takes


class TpuAttentionWork(NamedTuple):
    """The plans that all layers of a step share."""

    ragged: Ragged
    decode: Any  # paged_attention.tpu.plan.WorkItems
    prefill: Any  # likewise; None if every row is one token


def supports(spec: AttentionSpec) -> str | None:
    """Return None, or the reason why the kernels cannot run `spec`."""
    from pallas_kernels.ops.paged_attention.tpu import config

    return config.supports(spec)


def row(spec: AttentionSpec) -> tuple[int, int]:
    """Return how many kv heads share a pool row, and the row's width."""
    from pallas_kernels.ops.paged_attention.tpu.lanes import row_of

    layout = row_of(spec)
    return layout.heads, layout.width


def make(spec: AttentionSpec | None, decode: bool, few: bool = False) -> TpuAttention:
    """Build the attention of a bucket.

    `decode`: every program row is one token, so no prefill plan is made. `few` is ignored.
    """
    assert spec is not None, "the kernels need a spec"
    return TpuAttention(spec, decode)


@dataclass(frozen=True)
class TpuAttention:
    """Attention of one bucket by the TPU kernels."""

    spec: AttentionSpec
    decode: bool

    def _configs(self) -> tuple[Any, Any]:
        from pallas_kernels.ops.paged_attention.tpu.config import decode_config, prefill_config, shape_of

        shape = shape_of(self.spec)
        return decode_config(shape, 1 if self.decode else QUERIES), prefill_config(shape)

    def plan(self, ragged: Ragged) -> TpuAttentionWork:
        from pallas_kernels.ops.paged_attention.tpu.plan import plan_decode, plan_prefill

        decode, prefill = self._configs()
        longer = None if self.decode else plan_prefill(ragged, queries=prefill.queries, above=decode.queries)
        return TpuAttentionWork(ragged, plan_decode(ragged, queries=decode.queries), longer)

    def __call__(self, inputs: AttentionInputs, pool: Pool, work: TpuAttentionWork) -> tuple[jax.Array, Pool]:
        from pallas_kernels.ops.kv_write.tpu import write_kv
        from pallas_kernels.ops.paged_attention.tpu.kernel import paged_attention
        from pallas_kernels.ops.paged_attention.tpu.lanes import row_of

        q, k, v, scales = rotate(inputs.q, inputs.turn), rotate(inputs.k, inputs.turn), inputs.v, inputs.scales
        assert v is not None, "a latent is refused by `supports`"
        interpret = True if self.spec.interpret else None
        k_pool, v_pool = pool
        if scales is not None:
            k, v = quantized(k, scales.k, k_pool.dtype), quantized(v, scales.v, v_pool.dtype)
        row = row_of(self.spec)
        if not row.plain:
            q, k, v = row.spread(q), row.joined(k), row.joined(v)
        k_pool, v_pool = write_kv(k_pool, v_pool, k, v, work.ragged, interpret=interpret)
        rest: dict[str, Any] = {**inputs.options, "interpret": interpret}
        decode, prefill = self._configs()
        mixed, lse = paged_attention(q, k_pool, v_pool, work.ragged, work.decode, config=decode, **rest)
        if work.prefill is not None:
            longer, more = paged_attention(q, k_pool, v_pool, work.ragged, work.prefill, config=prefill, **rest)
            mine = work.ragged.lengths[jnp.minimum(work.ragged.rows, len(work.ragged.lengths) - 1)] > decode.queries
            mixed, lse = jnp.where(mine[:, None, None], longer, mixed), jnp.where(mine[:, None], more, lse)
        mixed = mixed if row.plain else row.own(mixed)
        return (mixed if inputs.sinks is None else with_sinks(mixed, lse, inputs.sinks)), (k_pool, v_pool)
