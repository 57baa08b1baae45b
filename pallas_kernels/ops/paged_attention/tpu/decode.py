"""Decode paged attention for TPU: rows of 1 .. Q tokens, an item each (see kernel.py for how).

Keys and values of a row are read once, all its queries together; that is the floor. Tokens of longer rows, which are
not in the plan, give zeros and MASKED.
"""

from __future__ import annotations

from pallas_kernels.ops.paged_attention.tpu.config import MIXED_ROWS, Config, Shape, supports, tile_keys
from pallas_kernels.ops.paged_attention.tpu.kernel import paged_attention
from pallas_kernels.ops.paged_attention.tpu.plan import Work, plan_decode

__all__ = ["Config", "Work", "heuristic", "paged_decode", "plan_decode", "supports"]

paged_decode = paged_attention  # with work of plan_decode(ragged, queries=config.queries)


def heuristic(shape: Shape, queries: int = 1) -> Config:
    """For rows of up to `queries` tokens."""
    return Config(queries, tile_keys(shape), mixed=queries * shape.heads <= MIXED_ROWS)
