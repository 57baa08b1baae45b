"""Which weights are quantized to 8 bits, and how: from `--quantization` or from the checkpoint (see `packed`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.sched.api.errors import InvalidValue

LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}
BLOCK = (128, 128)


@dataclass(frozen=True, slots=True)
class Quantization:
    """A quantization of checkpoint weights [out, in] to 8-bit values and scales."""

    dtype: str  # float8_e4m3fn or int8
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale; None: one scale per output
    stored: bool = False  # the checkpoint has NAME in `dtype` and NAME_scale_inv; else it is quantized on loading
    kept: tuple[str, ...] = ()  # modules that are not quantized in the checkpoint, as its config names them

    def takes(self, tensor: str) -> bool:
        """Return whether a checkpoint tensor, MODULE.weight, is quantized."""
        module = tensor.removesuffix(".weight")
        return module != tensor and not any(_names(pattern, module) for pattern in self.kept)

    def scales(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the scales of a weight [out, in]."""
        rows, columns = self.block or (1, shape[1])
        return -(-shape[0] // rows), -(-shape[1] // columns)


def _names(pattern: str, module: str) -> bool:
    """Match a module as transformers matches `modules_to_not_convert`: by prefix, as a regex, or by suffix."""
    return bool(re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", module)) or module.endswith(pattern)


FLAG: Mapping[str, Quantization] = {
    "int8": Quantization("int8"),
    "fp8": Quantization("float8_e4m3fn"),
    "fp8_per_block": Quantization("float8_e4m3fn", BLOCK),
}


def chosen(stored: Quantization | None, name: str | None) -> Quantization | None:
    """Return the quantization to use, given the checkpoint's and that of `--quantization` (None: not given).

    Raises InvalidValue if the two have different dtypes.
    """
    if name is None:
        return stored
    how = FLAG[name]
    if stored is not None and stored.dtype != how.dtype:
        raise InvalidValue(
            f"quantization={name!r}: the checkpoint is already quantized to {stored.dtype}; omit the option",
            "quantization",
        )
    return stored or how
