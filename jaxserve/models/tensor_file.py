"""A safetensors file with memory-mapped tensors, which occupy memory only while they are read.

The safetensors library validates the file. It cannot read the tensors, because it copies them and has
no numpy type for 8-bit floats.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from jaxserve.models.json_file import parsed

DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
    "U8": np.uint8,
}


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """Return what the header of a file says of each tensor, and where the tensors start. Raises OSError, ValueError."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError("the header is cut off")
        header = parsed(stream.read(size))
    if not isinstance(header, dict):
        raise ValueError("the header is no JSON object")
    header.pop("__metadata__", None)
    return header, 8 + size


class TensorFile:
    """An open safetensors file. Raises what `safe_open` raises if the file is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checked: Any = safe_open(path, framework="numpy")
        self._header, self._start = header_of(path)

    def __enter__(self) -> Self:
        self._checked.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._checked.__exit__(kind, error, trace)

    def keys(self) -> list[str]:
        return list(self._header)

    def get_slice(self, name: str) -> Any:
        """Return the description of a tensor, which has `get_shape` and `get_dtype`."""
        return self._checked.get_slice(name)

    def get_tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor as a memory map. Raises ValueError for an unsupported dtype."""
        described = self._header[name]
        if described["dtype"] not in DTYPES:
            raise ValueError(f"{name} has dtype {described['dtype']}; supported: {', '.join(DTYPES)}")
        shape, dtype = tuple(described["shape"]), np.dtype(DTYPES[described["dtype"]])
        if not np.prod(shape):
            return np.zeros(shape, dtype)
        return np.memmap(self.path, dtype, "r", self._start + described["data_offsets"][0], shape)
