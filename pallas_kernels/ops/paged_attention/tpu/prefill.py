"""Ragged prefill paged attention for TPU: chunks of many rows at any offset, in items of Q tokens (see kernel.py).

Keys after an item's last token are not read: a prompt of n tokens computes n^2 / 2 scores, plus the
rest of the tiles on the diagonal. Rows of at most `above` tokens are left to decode and give zeros
and MASKED.
"""

from __future__ import annotations

from dataclasses import replace

from pallas_kernels.ops.paged_attention.tpu.config import Config, TpuShape, supports, tile_keys
from pallas_kernels.ops.paged_attention.tpu.kernel import paged_attention
from pallas_kernels.ops.paged_attention.tpu.plan import plan_prefill

__all__ = ["Config", "heuristic", "paged_prefill", "plan_prefill", "supports"]
LEAST = 16  # tokens of an item

paged_prefill = paged_attention  # with work of plan_prefill(ragged, queries=config.queries, above=...)


def heuristic(shape: TpuShape, queries: int = 64) -> Config:
    """Return a config with items of up to `queries` tokens, or fewer if vector memory does not hold that many heads.

    Longer items share the cost of reading a tile, but waste more at the ends of rows.
    """
    config = Config(queries, tile_keys(shape), mixed=shape.kv_heads == 1)
    while config.queries > LEAST and 2 * config.vmem_bytes(shape) > config.vmem:
        config = replace(config, queries=config.queries // 2)
    return config
