"""Read MXFP4 tensors: blocks of 32 four-bit floats (E2M1) with a common power of two (OCP MX v1.0, section 5.3.3).

A checkpoint has `NAME_blocks` [X, out, in / 32, 16], two values per byte with the low half first, and
`NAME_scales` [X, out, in / 32], exponents plus 127. They are read as NAME [X, in, out] in bfloat16,
which represents every value exactly, because it has the same exponent range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

BLOCKS, SCALES = "_blocks", "_scales"
HALF = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
VALUES = np.concatenate([HALF, -HALF])
PAIRS = np.stack([VALUES[np.arange(256) % 16], VALUES[np.arange(256) // 16]], axis=-1)  # [256, 2], by byte


@dataclass(frozen=True)
class Unpacked:
    """A view of open files that dequantizes a tensor on reading, and its description."""

    name: str
    blocks: Any  # open file with the blocks
    scales: Any  # open file with the scales, which may be another

    def get_shape(self) -> list[int]:
        experts, outputs, count, half = self.blocks.get_slice(self.name + BLOCKS).get_shape()
        return [experts, count * half * 2, outputs]

    def get_dtype(self) -> str:
        return "BF16"

    def get_slice(self, name: str) -> Unpacked:
        return self

    def get_tensor(self, name: str) -> npt.NDArray[Any]:
        return dequantized(self.blocks.get_tensor(self.name + BLOCKS), self.scales.get_tensor(self.name + SCALES))


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


def unpacked(tensors: Mapping[str, tuple[Path, Any]]) -> dict[str, tuple[Path, Any]]:
    """Replace matching pairs of blocks and scales by one tensor. `tensors` maps names to (path, open file)."""
    readable = dict(tensors)
    for name in tensors:
        whole = name.removesuffix(BLOCKS)
        if whole != name and whole + SCALES in tensors and _fit(whole, tensors):
            (path, blocks), (_, scales) = readable.pop(name), readable.pop(whole + SCALES)
            readable[whole] = path, Unpacked(whole, blocks, scales)
    return readable


def _fit(whole: str, tensors: Mapping[str, tuple[Path, Any]]) -> bool:
    """Return whether blocks and scales match. Others are left alone, and reported as unexpected tensors later."""
    blocks, scales = (tensors[whole + end][1].get_slice(whole + end) for end in (BLOCKS, SCALES))
    return (
        blocks.get_dtype() == scales.get_dtype() == "U8"
        and len(blocks.get_shape()) == 4
        and list(blocks.get_shape())[:-1] == list(scales.get_shape())
    )
