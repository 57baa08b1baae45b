"""Read MXFP4 tensors: blocks of 32 four-bit floats (E2M1) with a common power of two (OCP MX v1.0, section 5.3.3).

A checkpoint has `NAME_blocks` [X, out, in / 32, 16], two values per byte with the low half first, and
`NAME_scales` [X, out, in / 32], exponents plus 127. They are read as NAME [X, in, out] in bfloat16,
which represents every value exactly, because it has the same exponent range.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxserve.models.packed.computed import Array, Computed, Parts, Tensors, replaced

BLOCKS, SCALES = "_blocks", "_scales"
HALF = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
VALUES = np.concatenate([HALF, -HALF])
PAIRS = np.stack([VALUES[np.arange(256) % 16], VALUES[np.arange(256) // 16]], axis=-1)  # [256, 2], by byte


def dequantized(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Dequantize blocks [X, out, G, 16] with scales [X, out, G] to [X, in, out] bfloat16.

    Only one expert at a time is held in float32.
    """
    experts, outputs, count, half = blocks.shape
    out = np.empty((experts, count * half * 2, outputs), ml_dtypes.bfloat16)
    for i in range(experts):
        power = np.ldexp(np.float32(1.0), scales[i].astype(np.int32) - 127)  # [out, G]
        out[i] = (PAIRS[blocks[i]] * power[..., None, None]).reshape(outputs, -1).T
    return out


def declared(given: Mapping[str, Any]) -> None:
    """See `methods.Method`."""


def unpacked(tensors: Tensors, given: Mapping[str, Any]) -> dict[str, tuple[Path, Any]]:
    return replaced(tensors, (BLOCKS, SCALES), (), _views)


def _views(parts: Parts) -> dict[str, Computed] | None:
    shape = parts.shape(BLOCKS)
    if len(shape) != 4 or shape[:-1] != parts.shape(SCALES) or {parts.dtype(end) for end in (BLOCKS, SCALES)} != {"U8"}:
        return None
    experts, outputs, count, half = shape
    return {"": parts.computed((experts, count * half * 2, outputs), "BF16", _compute)}


def _compute(read: dict[str, Array]) -> Array:
    return dequantized(read[BLOCKS], read[SCALES])
