"""Quantize weights to 8 bits: their descriptions and their tensors.

Scales are kept finer than in checkpoints: one for each output and each block of inputs. The function
that builds a weight (packs, reorders or splits its outputs) therefore builds its scales as well, and no
shard boundary falls inside a block of outputs. Blocks of inputs are shortened to a length that divides
the inputs: 192 inputs in blocks of 128 have three scales, of which the first two are equal. With
blocks of 128 this costs 4 more bytes per 128 weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.models.layers import Array, Info, Source
from jaxserve.models.quantization import LARGEST, Quantization
from jaxserve.models.quantized import Quantized

SCALE = "_scale_inv"  # suffix of a weight's name for its scales in the checkpoint
ROWS = 1024  # outputs quantized at a time, which bounds the float32 copy


def narrowed(info: Info, how: Quantization | None) -> Info | Quantized:
    """Return the description of the 8-bit form of a weight, or `info` if it is not quantized.

    Only weights of products are, and only if `how` covers all of their tensors.
    """
    axis = info.contract
    if how is None or axis is None or not info.sources or not all(how.takes(source.name) for source in info.sources):
        return info
    inputs = info.shape[axis]
    blocks = 1 if how.block is None else inputs // gcd(how.block[1], inputs)
    stored = tuple(Source(source.name + SCALE, how.scales(_matrix(source))) for source in info.sources)

    def build(*scales: Array) -> Array:
        return info.build(
            *(_spread(scale, _matrix(s), how, blocks) for scale, s in zip(scales, info.sources, strict=True))
        )

    shape = (*info.shape[:axis], blocks, *info.shape[axis + 1 :])
    dtype = jnp.dtype(jnp.float32)
    scale = replace(info, shape=shape, sources=stored if how.stored else (), build=build, dtype=dtype)
    return Quantized(replace(info, dtype=jnp.dtype(how.dtype)), scale, axis)


def _matrix(source: Source) -> tuple[int, int]:
    """Return the shape [out, in]."""
    outputs, inputs = source.shape
    return outputs, inputs


def _spread(scales: Array, shape: tuple[int, int], how: Quantization, blocks: int) -> Array:
    """Expand a checkpoint's scales to [out, blocks] for a weight [out, in] of `shape`."""
    outputs, inputs = shape
    if how.block is None:
        return scales
    rows, columns = how.block
    return np.repeat(scales, rows, axis=0)[:outputs, np.arange(blocks) * (inputs // blocks) // columns]


def quantize(x: Array, how: Quantization) -> tuple[Array, Array]:
    """Quantize a weight [out, in] to values and scales in the checkpoint's layout."""
    outputs, inputs = x.shape
    rows, columns = how.block or (1, inputs)
    dtype, largest = jnp.dtype(how.dtype), np.float32(LARGEST[how.dtype])
    values, scales = np.empty(x.shape, dtype), np.empty(how.scales((outputs, inputs)), np.float32)
    step = max(ROWS // rows, 1) * rows
    for at in range(0, outputs, step):
        part = x[at : at + step].astype(np.float32)
        edges = [np.arange(0, length, block) for length, block in zip(part.shape, (rows, columns), strict=True)]
        peaks = np.maximum.reduceat(np.maximum.reduceat(np.abs(part), edges[0], axis=0), edges[1], axis=1)
        scale = np.where(peaks > 0, peaks / largest, np.float32(1.0)).astype(np.float32)
        scales[at // rows : at // rows + len(scale)] = scale
        part /= _every(scale, (rows, columns), part.shape)
        values[at : at + step] = np.rint(part) if dtype.kind == "i" else np.clip(part, -largest, largest)
    return values, scales


def dequantize(values: Array, scales: Array, block: tuple[int, int]) -> Array:
    """Return the weight [out, in] float32 that `quantize` rounded to these values and scales."""
    out: Array = values.astype(np.float32)
    out *= _every(scales.astype(np.float32), block, values.shape)
    return out


def _every(scales: Array, block: tuple[int, int], shape: Sequence[int]) -> Array:
    """Broadcast scales to one per value."""
    if block == (1, shape[1]):
        return scales
    tall = np.repeat(scales, block[0], axis=0)[: shape[0]]
    return np.repeat(tall, block[1], axis=1)[:, : shape[1]]


class Dequantized:
    """A view of an open file that dequantizes a tensor on reading."""

    def __init__(self, file: Any, scales: Any, block: tuple[int, int] | None) -> None:
        self.file, self.scales, self.block = file, scales, block

    def get_slice(self, name: str) -> Any:
        return _Described(self.file.get_slice(name).get_shape())

    def get_tensor(self, name: str) -> Array:
        values = self.file.get_tensor(name)
        return dequantize(values, self.scales.get_tensor(name + SCALE), self.block or (1, values.shape[1]))


class _Described:
    def __init__(self, shape: Iterable[int]) -> None:
        self.shape = list(shape)

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return "F32"
