"""Decode paged attention for TPU: rows of 1 .. Q tokens, an item each (see kernel.py for how).

Keys and values of a row are read once, all its queries together; that is the floor. Tokens of longer rows, which are
not in the plan, give zeros and MASKED.
"""

from __future__ import annotations

from functools import partial

from pallas_kernels.aot.cases import Case
from pallas_kernels.tpu.cases import MODELS, NARROW, Layer, in_place
from pallas_kernels.tpu.config import MIXED_ROWS, Config, Shape, supports, tile_keys
from pallas_kernels.tpu.kernel import paged_attention
from pallas_kernels.tpu.plan import Work, plan_decode

__all__ = ["Config", "Work", "cases", "heuristic", "paged_decode", "plan_decode", "supports"]

paged_decode = paged_attention  # with work of plan_decode(ragged, queries=config.queries)


def heuristic(shape: Shape, queries: int = 1) -> Config:
    """For rows of up to `queries` tokens."""
    return Config(queries, tile_keys(shape), mixed=queries * shape.heads <= MIXED_ROWS)


def cases() -> list[Case]:
    """For the compile gate: pages, pools and query tokens of what is served."""
    found: list[Case] = []
    for model in MODELS:
        found += [_case(model, page) for page in (16, 64, 256)]
        found += [_case(model, 64, queries, usual=queries == 16) for queries in (4, 16)]
    for stored in ("int8", "float8_e4m3fn"):
        found += [_case("8b", 64, 1, stored), _case("8b", 64, 16, stored, usual=False)]
    found += [in_place(model, 64, 256, 256, 2**23) for model in MODELS]
    found += [in_place(model, 64, 256, 256, 2**24) for model in NARROW]
    layer = Layer("decode", "8b", 64, 64, 64, note=" q1 window softcap")
    found.append(layer.case(heuristic(layer.shape), partial(plan_decode, queries=1), window=4096, softcap=50.0))
    return found


def _case(model: str, page: int, queries: int = 1, stored: str = "bfloat16", usual: bool = True) -> Case:
    layer = Layer("decode", model, page, 64 * queries, 64, stored, f" q{queries}", usual)
    return layer.case(heuristic(layer.shape, queries), partial(plan_decode, queries=queries))
