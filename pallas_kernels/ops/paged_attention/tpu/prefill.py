"""Ragged prefill paged attention for TPU: chunks of many rows at any offset, in items of Q tokens (see kernel.py).

Keys beyond an item's last token are not read: a prompt of n tokens costs n^2 / 2 scores, and the rest of the tiles at
the diagonal. Rows of at most `above` tokens, left to decode, give zeros and MASKED.
"""

from __future__ import annotations

from dataclasses import replace

from pallas_kernels.ops.paged_attention.tpu.config import Config, Shape, supports, tile_keys
from pallas_kernels.ops.paged_attention.tpu.kernel import paged_attention
from pallas_kernels.ops.paged_attention.tpu.plan import Work, plan_prefill

__all__ = ["Config", "Work", "heuristic", "paged_prefill", "plan_prefill", "supports"]
LEAST = 16  # tokens of an item

paged_prefill = paged_attention  # with work of plan_prefill(ragged, queries=config.queries, above=...)


def heuristic(shape: Shape, queries: int = 64) -> Config:
    """Items of up to `queries` tokens: more share the cost of a tile, and waste more where a row ends. Fewer where
    vector memory does not hold so many heads."""
    config = Config(queries, tile_keys(shape), mixed=shape.kv_heads == 1)
    while config.queries > LEAST and 2 * config.vmem_bytes(shape) > config.vmem:
        config = replace(config, queries=config.queries // 2)
    return config
