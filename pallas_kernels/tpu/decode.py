"""Decode paged attention for TPU: rows of 1 .. Q tokens, each an item of its own. See kernel.py for how.

    paged_decode(q, k_pool, v_pool, ragged, work, scale=...) -> out [T, H, D], lse [T, H]

with the letters and the contract of `tests/kernels/reference.py`: causal among a row's own tokens, too. It reads the
keys and values of its rows once, which is the floor. Tokens that are not in `work` give zeros and MASKED.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.backends.base import Spec
from pallas_kernels.layout import Ragged, Scales
from pallas_kernels.tpu.config import Config, Shape
from pallas_kernels.tpu.kernel import attend
from pallas_kernels.tpu.plan import Work, plan_decode

__all__ = ["Config", "paged_decode", "plan_decode"]
MIXED_ROWS = 128  # rows of queries up to which a product with the keys of all heads costs no more than its loads


def paged_decode(
    q: jax.Array,  # [T, H, D]
    k_pool: jax.Array,  # [N, B, K, D]
    v_pool: jax.Array,  # [N, B, K, D]
    ragged: Ragged,
    work: Work,  # plan_decode(ragged, queries=config.queries)
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    scales: Scales | None = None,
    config: Config,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`interpret`: None compiles, True or `pltpu.InterpretParams(...)` runs it on the host."""
    return attend(
        q,
        k_pool,
        v_pool,
        ragged.block_tables,
        work,
        scale=scale,
        window=window,
        softcap=softcap,
        scales=scales,
        config=config,
        interpret=interpret,
    )
