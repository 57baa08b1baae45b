"""Tensors that are computed from others of a checkpoint when they are read, and the arithmetic of 4 and 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Tensors = Mapping[str, tuple[Path, Any]]  # by name: path and open file
ROWS = 1024  # outputs widened at a time, which bounds the float32 copy


@dataclass(frozen=True)
class Computed:
    """A view of open files that computes a tensor on reading, and its description."""

    parts: Mapping[str, tuple[str, Any]]  # by the ends of their names: name and open file
    shape: tuple[int, ...]
    dtype: str
    compute: Callable[[dict[str, Array]], Array]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.dtype

    def get_slice(self, name: str) -> Computed:
        return self

    def get_tensor(self, name: str) -> Array:
        return self.compute({end: file.get_tensor(part) for end, (part, file) in self.parts.items()})


@dataclass(frozen=True)
class Parts:
    """Tensors of a checkpoint that make up one tensor, by the ends of their names."""

    parts: Mapping[str, tuple[str, Any]]

    def __contains__(self, end: str) -> bool:
        return end in self.parts

    def shape(self, end: str) -> tuple[int, ...]:
        name, file = self.parts[end]
        return tuple(file.get_slice(name).get_shape())

    def dtype(self, end: str) -> str:
        name, file = self.parts[end]
        return str(file.get_slice(name).get_dtype())

    def tensor(self, end: str) -> Array:
        name, file = self.parts[end]
        tensor: Array = file.get_tensor(name)
        return tensor

    def computed(self, shape: tuple[int, ...], dtype: str, compute: Callable[[dict[str, Array]], Array]) -> Computed:
        return Computed(self.parts, shape, dtype, compute)


def replaced(
    tensors: Tensors,
    needed: Sequence[str],
    optional: Sequence[str],
    views: Callable[[Parts], Mapping[str, Computed] | None],
) -> dict[str, tuple[Path, Any]]:
    """Replace the tensors of each module by the views on them.

    needed, optional: ends of the tensors' names. `views` maps ends of new names to views; None if the parts do not
    fit: they are left alone, and reported as unexpected tensors later.
    """
    readable = dict(tensors)
    for name in tensors:
        module = name.removesuffix(needed[0])
        if module == name or any(module + end not in tensors for end in needed):
            continue
        ends = [end for end in (*needed, *optional) if module + end in tensors]
        made = views(Parts({end: (module + end, tensors[module + end][1]) for end in ends}))
        if made is None:
            continue
        for end in ends:
            readable.pop(module + end, None)
        readable |= {module + end: (tensors[name][0], view) for end, view in made.items()}
    return readable


def fields(words: Array, bits: int) -> npt.NDArray[np.uint8]:
    """Unpack integers of 4 or 8 bits from words [..., W] int32, low bits first: [..., W * 32 / bits]."""
    parts = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return parts
    return np.stack([parts & 15, parts >> 4], axis=-1).reshape(*parts.shape[:-1], -1)


def widened(values: Array, scales: Array, zeros: Array | int, group: Array) -> Array:
    """Return (values - zeros) * scales in the dtype of the scales, rounded once.

    values: [out, in]. scales, zeros: [out, G]. group: of each input, [in].
    """
    out = np.empty(values.shape, scales.dtype)
    for at in range(0, len(values), ROWS):
        rows = slice(at, at + ROWS)
        part = values[rows].astype(np.float32)
        part -= zeros if isinstance(zeros, int) else zeros[rows].astype(np.float32)[:, group]
        part *= scales[rows].astype(np.float32)[:, group]
        out[rows] = part
    return out


def groups_of(inputs: int, groups: int, size: int, given: Array | None) -> npt.NDArray[np.int64]:
    """Return the group of each input. given: as the checkpoint has it (act-order). Raises ValueError.

    size: inputs of a group where `groups` does not divide them.
    """
    if given is None:
        return np.arange(inputs) // (size if inputs % groups else inputs // groups)
    if given.shape != (inputs,) or given.min() < 0 or given.max() >= groups:
        raise ValueError(f"its g_idx must name a group of {groups} for each of {inputs} inputs")
    return given.astype(np.int64)
