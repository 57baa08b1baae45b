"""Decode paged attention for TPU: each row of 1 to Q tokens is one item (see kernel.py).

Keys and values of a row are read once for all its queries, which is the floor. Tokens of longer
rows are not in the plan and give zeros and MASKED.
"""

from __future__ import annotations

from pallas_kernels.ops.paged_attention.tpu.config import MIXED_ROWS, Config, TpuShape, supports, tile_keys
from pallas_kernels.ops.paged_attention.tpu.kernel import paged_attention
from pallas_kernels.ops.paged_attention.tpu.plan import plan_decode

__all__ = ["Config", "heuristic", "paged_decode", "plan_decode", "supports"]

paged_decode = paged_attention  # with work of plan_decode(ragged, queries=config.queries)


def heuristic(shape: TpuShape, queries: int = 1) -> Config:
    """Return a config for rows of up to `queries` tokens."""
    return Config(queries, tile_keys(shape), mixed=queries * shape.heads <= MIXED_ROWS)
