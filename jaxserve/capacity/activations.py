"""Estimates of the memory that the largest step needs beyond weights and KV pages, per device.

A matrix of width W produces T rows of W. The estimate has three arrays [T, E], for the residual
stream, a module's input and the step's result, plus the outputs of all matrices of the widest
module: its last matrix reads what its first ones produced. An activation without a gate is computed
in place. Llama-3-8B at 8,192 tokens: 906 MB, where XLA's plan for an H200 has 908 MB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.capacity.costs import is_matrix
from jaxserve.models import registry
from jaxserve.models.layers import Info, Tree
from jaxserve.models.quantized import Quantized
from jaxserve.models.spec import ModelSpec

COUNTS = jnp.dtype(jnp.int16).itemsize  # bytes of one of a slot's token counts, for penalties
STREAMS = 3  # arrays [T, E]


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes on one device."""

    step: int  # of the largest step
    draw: int  # of sampling, which follows the step
    counts: int  # token counts of all slots
    source: str = "counted"

    @property
    def bytes(self) -> int:
        return max(self.step, self.draw) + self.counts

    @classmethod
    def counted(cls, spec: ModelSpec, tp: int, dtype: Any, tokens: int, rows: int) -> Activations:
        """Estimate for a step of `tokens` tokens, and for sampling `rows` rows."""
        shared = spec.for_tp(tp)
        tree = registry.abstract_weights(shared, dtype)
        item, widest = jnp.dtype(dtype).itemsize, 0.0
        for kind in set(shared.kinds):
            modules = [part for part in tree["layers"][kind].values() if isinstance(part, Mapping)]
            widest = max(widest, *(_module(module, shared, tp, item) for module in modules))
        step = tokens * (STREAMS * spec.dim * item + widest)
        if spec.quantized is not None:
            step += max(_widened(tree["layers"][kind], tp, item) for kind in set(shared.kinds))
        gathered = 1 if tp == 1 else 2  # arrays of logits: a mesh gathers them first
        draw = gathered * rows * spec.vocab * 4 + adjusted(spec, rows)
        return cls(round(step), draw, rows * spec.vocab * COUNTS)


def adjusted(spec: ModelSpec, rows: int) -> int:
    """Return the extra bytes of sampling with penalties and biases: the logits once more."""
    return rows * spec.vocab * 4


def _module(module: Tree, spec: ModelSpec, tp: int, item: int) -> float:
    """Return the bytes per token of a module's matrices."""
    infos = jax.tree.leaves(module, is_leaf=lambda x: isinstance(x, Info))
    matrices = [info for info in infos if is_matrix(info)]
    routed = [info for info in matrices if "experts" in info.axes]
    in_place = any(info.axes == ("dim", "ff") for info in matrices)
    dense = [info for info in matrices if info not in routed and "dim" in info.axes]
    widths = sum(_width(info, spec, tp) for info in dense if not (in_place and info.axes == ("ff", "dim")))
    if spec.latent is not None and "kv_down" in module:  # queries before and after absorption, and their results
        widths += spec.heads // tp * (spec.head_dim + 2 * spec.cache.dim + spec.latent.value)
    bytes_ = widths * item
    if spec.moe is not None and routed:
        # Each shard sorts all tokens' copies [T, C, E] by expert for gate and up; down produces as many in float32.
        # Scales, if any, are the smallest leaves.
        sizes = sorted((prod(info.shape) // spec.moe.experts // spec.dim for info in routed), reverse=True)
        wide, narrow = sizes[:2]
        bytes_ += spec.moe.chosen * max((spec.dim + wide) * item, narrow * item + spec.dim * 4)
    return bytes_


def _widened(layer: Tree, tp: int, item: int) -> float:
    """Return the bytes of a layer's largest 8-bit weight in the dtype of its matmul."""
    parts = jax.tree.leaves(layer, is_leaf=lambda x: isinstance(x, Quantized | Info))
    return max((part.values.size_per_device(tp) * item for part in parts if isinstance(part, Quantized)), default=0)


def _width(info: Info, spec: ModelSpec, tp: int) -> float:
    return (
        prod(size // tp if axis else size for size, axis in zip(info.shape, info.partition(tp), strict=True)) / spec.dim
    )
