"""What a step of a dense decoder cannot avoid: bytes of a decode step, floating-point operations of a prompt chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.models import registry
from jaxserve.models.layers import Info
from jaxserve.models.spec import ModelSpec
from jaxserve.sched.api.perf import Load
from jaxserve.sched.perf.profile import Row

COPY, MATMUL = "copy_tb_s", "matmul_tflop_s"  # facts: the ceilings measured on this device


class Parameters(NamedTuple):
    """The numbers of a model's weights that a step multiplies: once per token, and once per sampled row."""

    token: int
    row: int


def parameters(spec: ModelSpec) -> Parameters:
    """Count the weights of the layers, and of the output head. Raises ValueError for a mixture of experts."""
    if spec.moe is not None:
        raise ValueError("the floors are those of dense models")
    tree = registry.abstract_weights(spec, "float32")

    def count(part: Any) -> int:
        return sum(prod(leaf.shape) for leaf in jax.tree.leaves(part, is_leaf=lambda leaf: isinstance(leaf, Info)))

    return Parameters(count(tree["layers"]), count(tree["embed" if spec.tied else "head"]))


def decode_bytes(spec: ModelSpec, dtype: Any, rows: int, context: int) -> int:
    """Return the bytes that a decode step reads: all weights once, an embedding and `context` tokens of KV per row."""
    each, counted = int(jnp.dtype(dtype).itemsize), parameters(spec)
    kv = rows * context * spec.cache.page_bytes(1, dtype)
    return each * (counted.token + counted.row + rows * spec.dim) + kv


def chunk_flops(spec: ModelSpec, chunks: Sequence[Row]) -> float:
    """Return the operations of prompt chunks, one sampled token each: two per weight, and causal attention."""
    counted, load = parameters(spec), Load()
    for chunk in chunks:
        load = load.add_chunk(chunk.length, chunk.start)
    attention = 4 * spec.layers * spec.heads * spec.head_dim * load.quadratic
    return 2 * (counted.token * load.prefill + counted.row * len(chunks)) + attention


def against_bytes(facts: Mapping[str, Any], seconds: float, size: float) -> dict[str, float | None]:
    """Return a step's bandwidth, and its time relative to the floor; None without a measured ceiling."""
    ceiling = facts.get(COPY)
    floor = None if ceiling is None else size / (1e12 * float(ceiling))
    return {"gb_floor": size / 1e9, "tb_s": size / seconds / 1e12, **_against(seconds, floor)}


def against_flops(facts: Mapping[str, Any], seconds: float, operations: float) -> dict[str, float | None]:
    """Return a chunk's TFLOP/s, and its time relative to the floor; None without a measured ceiling."""
    ceiling = facts.get(MATMUL)
    floor = None if ceiling is None else operations / (1e12 * float(ceiling))
    return {"tflop": operations / 1e12, "tflop_s": operations / seconds / 1e12, **_against(seconds, floor)}


def _against(seconds: float, floor: float | None) -> dict[str, float | None]:
    return {
        "floor_ms": None if floor is None else 1e3 * floor,
        "x_floor": None if floor is None else seconds / floor,
    }
