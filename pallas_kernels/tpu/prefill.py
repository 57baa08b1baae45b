"""Ragged prefill paged attention for TPU: chunks of many rows at any offset, in items of Q tokens (see kernel.py).

Keys beyond an item's last token are not read: a prompt of n tokens costs n^2 / 2 scores, and the rest of the tiles at
the diagonal. Rows of at most `above` tokens, left to decode, give zeros and MASKED.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pallas_kernels.aot.cases import Case
from pallas_kernels.tpu.cases import MODELS, Layer, in_place
from pallas_kernels.tpu.config import Config, Shape, supports, tile_keys
from pallas_kernels.tpu.kernel import paged_attention
from pallas_kernels.tpu.plan import Work, plan_prefill

__all__ = ["Config", "Work", "cases", "heuristic", "paged_prefill", "plan_prefill", "supports"]
LEAST = 16  # tokens of an item

paged_prefill = paged_attention  # with work of plan_prefill(ragged, queries=config.queries, above=...)


def heuristic(shape: Shape, queries: int = 64) -> Config:
    """Items of up to `queries` tokens: more share the cost of a tile, and waste more where a row ends. Fewer where
    vector memory does not hold so many heads."""
    config = Config(queries, tile_keys(shape), mixed=shape.kv_heads == 1)
    while config.queries > LEAST and 2 * config.vmem_bytes(shape) > config.vmem:
        config = replace(config, queries=config.queries // 2)
    return config


def cases() -> list[Case]:
    """For the compile gate: pages and pools of what is served."""
    found: list[Case] = []
    for model in MODELS:
        found += [_case(model, page, usual=page != 64) for page in (16, 64, 256)]
    found += [_case("8b", 64, "int8"), _case("8b", 64, "float8_e4m3fn", usual=False)]
    found.append(in_place("8b-tp4", 64, 2048, 64, 2**26))
    layer = Layer("prefill", "8b", 64, 2048, 16, note=" window softcap", usual=False)
    config = heuristic(layer.shape)
    plan = partial(plan_prefill, queries=config.queries, above=16)
    found.append(layer.case(config, plan, window=4096, softcap=50.0))
    return found


def _case(model: str, page: int, stored: str = "bfloat16", usual: bool = True) -> Case:
    layer = Layer("prefill", model, page, 2048, 16, stored, usual=usual)
    config = heuristic(layer.shape)
    return layer.case(config, partial(plan_prefill, queries=config.queries, above=16))
