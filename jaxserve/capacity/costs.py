"""Lower bounds on what a step reads and computes, and the memory of weights, per device.

Counted from the abstract weight tree. Letters: E model dim, H query heads, D head dim, V vocabulary,
X experts, C chosen per token, T tokens, S rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.capacity.devices import Device
from jaxserve.engine.memory import kv
from jaxserve.models import registry
from jaxserve.models.layers import Info
from jaxserve.models.narrow import SCALE
from jaxserve.models.spec import ModelSpec

LOOKED_UP = ("embed", "positions")  # tables of which a token reads one row


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The bytes that a device moves to or from its memory, and the FLOPs that it computes."""

    bytes: float
    flops: float

    def seconds(self, device: Device) -> float:
        """Return the roofline time: reading and computing overlap at best."""
        return max(self.bytes / device.bandwidth, self.flops / device.flops)

    def bound(self, device: Device) -> str:
        """Return which of the two limits the time: "bytes" or "FLOPs"."""
        return "bytes" if self.bytes / device.bandwidth >= self.flops / device.flops else "FLOPs"


@dataclass(frozen=True)
class Costs:
    """One device's share of a model over `tp` devices. `parameters` are the whole model's, uncopied."""

    spec: ModelSpec  # as from `for_tp`
    tp: int
    dtype: Any
    cache_dtype: Any
    parameters: int  # of the checkpoint
    active: int  # those used by one token, without tables
    tables: int  # bytes of tables with row lookups only
    head: int  # bytes of the output head, read if a row is sampled
    experts: int  # bytes of routed experts
    every: int  # bytes of all other weights, read by each step
    token: float  # FLOPs per token, without attention and head
    draw: float  # FLOPs of the head per sampled row

    @classmethod
    def of(cls, spec: ModelSpec, tp: int, dtype: Any, cache_dtype: Any = None) -> Costs:
        """Count the costs. Raises InvalidValue if the model cannot be split over `tp` devices."""
        shared, kinds = spec.for_tp(tp), {"tables": 0, "head": 0, "experts": 0, "every": 0}
        token, draw = 0.0, 0.0
        for kind, info in _weights(shared, dtype):
            size = info.size_per_device(tp)
            kinds[kind] += size * jnp.dtype(info.dtype).itemsize
            if kind == "head":
                draw += 2 * size
            elif kind != "tables" and is_matrix(info):
                token += 2 * size * (_chosen(spec) if kind == "experts" else 1)
        plain = replace(spec, quantized=None)  # scales are not parameters
        read = {source: kind for kind, info in _weights(plain, dtype) for source in info.sources}
        counted = sum(prod(source.shape) for source in read)
        used = {"tables": 0.0, "experts": _chosen(spec)}
        active = sum(prod(source.shape) * used.get(kind, 1.0) for source, kind in read.items())
        return cls(shared, tp, dtype, cache_dtype or dtype, counted, round(active), **kinds, token=token, draw=draw)

    @property
    def weights(self) -> int:
        """The bytes of all weights on a device."""
        return self.tables + self.head + self.experts + self.every

    @property
    def kv_token(self) -> float:
        """The bytes per device of one token's keys and values in all layers."""
        return kv.page_bytes(self.spec, 1, self.cache_dtype) / self.tp

    def touched(self, tokens: float) -> float:
        """Return the expected share of experts chosen by any of `tokens` tokens, if all are equally likely.

        A token chooses C of X, so all tokens miss an expert with probability (1 - C / X)^tokens.
        """
        return 1.0 if self.spec.moe is None else 1 - (1 - _chosen(self.spec)) ** tokens

    def decode(self, rows: int, context: int) -> LayerWork:
        """Count a step of `rows` rows, each attending to `context` tokens, itself included."""
        seen = sum(min(context, self.spec.window_of(layer) or context) for layer in self._attending)
        weights = self.every + self.head + self.experts * self.touched(rows)
        moved = weights + rows * (self._layer_token * seen + self.kv_token + self._embedded + 2 * self.state)
        return LayerWork(moved, rows * (self.token + self.draw + self._pair * seen))

    def prefill(self, tokens: int, chunk: int) -> LayerWork:
        """Count a prompt in chunks, each of which reads the weights and the KV before it; samples one row."""
        moved, flops = float(self.head), self.draw + tokens * self.token
        for start in range(0, tokens, chunk):
            length = min(chunk, tokens - start)
            moved += self.every + self.experts * self.touched(length) + length * (self.kv_token + self._embedded)
            for layer in self._attending:
                window = self.spec.window_of(layer) or tokens
                moved += self._layer_token * min(start, window)
                flops += self._pair * (_pairs(start + length, window) - _pairs(start, window))
        return LayerWork(moved, flops)

    @property
    def _layer_token(self) -> float:
        return self.kv_token / self.spec.cache.layers

    @property
    def _attending(self) -> list[int]:
        """The layers with keys and values."""
        return self.spec.cache.kv(range(self.spec.layers))

    @property
    def state(self) -> float:
        """The bytes per device of what layers with linear attention keep of a request."""
        return 0.0 if self.spec.cache.state is None else self.spec.cache.state.slot_bytes() / self.tp

    @property
    def _embedded(self) -> int:
        """The bytes of a token's row in the tables."""
        return self.spec.dim * int(jnp.dtype(self.dtype).itemsize)

    @property
    def _pair(self) -> float:
        """The FLOPs in a layer for a token and one that it attends to: a score and a sum, over H heads.

        A latent is both key and value (absorbed), wider than a head; its rotary part is not summed.
        """
        latent = self.spec.latent
        value = self.spec.head_dim if latent is None else latent.rank
        return 2 * self.spec.heads * (self.spec.cache.dim + value) / self.tp


def is_matrix(info: Info) -> bool:
    """Return whether tokens are multiplied by a weight: not by norms, biases or scales."""
    return any(len(source.shape) > 1 and not source.name.endswith(SCALE) for source in info.sources)


def _chosen(spec: ModelSpec) -> float:
    """Return C / X."""
    return 1.0 if spec.moe is None else spec.moe.chosen / spec.moe.experts


def _pairs(tokens: int, window: int) -> int:
    """Count pairs of a token and one that it attends to: min(1, w) + min(2, w) + ... + min(T, w)."""
    full = min(tokens, window)
    return full * (full + 1) // 2 + (tokens - full) * window


def _weights(spec: ModelSpec, dtype: Any) -> Iterator[tuple[str, Info]]:
    """Yield every weight with its kind of `Costs`."""
    tree = registry.abstract_weights(spec, dtype)
    for path, info in jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, Info))[0]:
        top = path[0].key
        if top == "head" or (top == "embed" and spec.tied):
            yield "head", info
        elif top in LOOKED_UP:
            yield "tables", info
        else:
            yield ("experts" if "experts" in info.axes else "every"), info
