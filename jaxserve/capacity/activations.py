"""What the largest step holds beside weights and KV pages, on each device: counted from the weight tree.

A matrix of width W makes T rows of W. Counted are the residual stream, what a module reads of it, and what the step
hands over, [T, E] each, and the rows that all matrices of one module make, as its last one still reads what its first
ones made, but for an activation without a gate, which is computed in place. Llama-3-8B, 8,192 tokens: 906 MB; XLA's own
plan for an H200 has 908 MB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.capacity.costs import is_matrix, shard
from jaxserve.models import registry
from jaxserve.models.layers import Info, Tree
from jaxserve.models.quantised import Quantised
from jaxserve.models.spec import ModelSpec

COUNTS = jnp.dtype(jnp.int16).itemsize  # of a slot's token counts, for penalties
STREAMS = 3  # [T, E]


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes on one device."""

    step: int  # of the largest step
    draw: int  # of drawing from it, which follows it
    counts: int  # token counts of all slots
    source: str = "counted"

    @property
    def bytes(self) -> int:
        return max(self.step, self.draw) + self.counts

    @classmethod
    def counted(cls, spec: ModelSpec, tp: int, dtype: Any, tokens: int, rows: int) -> Activations:
        """Of a step of so many tokens, and of drawing for so many rows."""
        shared = spec.for_tp(tp)
        tree = registry.abstract_weights(shared, dtype)
        item, widest = jnp.dtype(dtype).itemsize, 0.0
        for kind in set(shared.kinds):
            modules = [part for part in tree["layers"][kind].values() if isinstance(part, Mapping)]
            widest = max(widest, *(_module(module, shared, tp, item) for module in modules))
        step = tokens * (STREAMS * spec.dim * item + widest)
        if spec.quantised is not None:
            step += max(_widened(tree["layers"][kind], tp, item) for kind in set(shared.kinds))
        gathered = 1 if tp == 1 else 2  # arrays of logits: those of a mesh are put together first
        draw = gathered * rows * spec.vocab * 4 + adjusted(spec, rows)
        return cls(round(step), draw, rows * spec.vocab * COUNTS)


def adjusted(spec: ModelSpec, rows: int) -> int:
    """Bytes that drawing with penalties and biases takes beside what drawing without takes: the logits once more."""
    return rows * spec.vocab * 4


def _module(module: Tree, spec: ModelSpec, tp: int, item: int) -> float:
    """Bytes for each token."""
    matrices = [info for info in _infos(module) if is_matrix(info)]
    routed = [info for info in matrices if "experts" in info.axes]
    in_place = any(info.axes == ("dim", "ff") for info in matrices)
    made = [info for info in matrices if info not in routed and "dim" in info.axes]
    widths = sum(_width(info, spec, tp) for info in made if not (in_place and info.axes == ("ff", "dim")))
    if spec.latent is not None and "kv_down" in module:  # queries before and after absorption, and what comes of them
        widths += spec.heads // tp * (spec.head_dim + 2 * spec.cache.dim + spec.latent.value)
    bytes_ = widths * item
    if spec.moe is not None and routed:
        # Each shard sorts all tokens' copies [T, C, E] by expert for gate and up; down makes as many in float32.
        # Scales, where there are any, are the smallest.
        sizes = sorted((prod(info.shape) // spec.moe.experts // spec.dim for info in routed), reverse=True)
        wide, narrow = sizes[:2]
        bytes_ += spec.moe.chosen * max((spec.dim + wide) * item, narrow * item + spec.dim * 4)
    return bytes_


def _widened(layer: Tree, tp: int, item: int) -> float:
    """Bytes of a layer's largest 8-bit weight in the dtype that products are computed in."""
    parts = jax.tree.leaves(layer, is_leaf=lambda x: isinstance(x, Quantised | Info))
    return max((shard(part.values, tp) * item for part in parts if isinstance(part, Quantised)), default=0)


def _width(info: Info, spec: ModelSpec, tp: int) -> float:
    return (
        prod(size // tp if axis else size for size, axis in zip(info.shape, info.partition(tp), strict=True)) / spec.dim
    )


def _infos(module: Tree) -> Iterator[Info]:
    yield from jax.tree.leaves(module, is_leaf=lambda x: isinstance(x, Info))
