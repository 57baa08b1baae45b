"""Which weights are kept in 8 bits, and how: from the flag `--quantization`, or from a checkpoint's config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.sched.api.errors import InvalidValue

LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}
BLOCK = (128, 128)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """A weight [out, in] of the checkpoint is its 8-bit values times scales."""

    dtype: str  # float8_e4m3fn or int8
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale; None: each output has one
    stored: bool = False  # the checkpoint has NAME in `dtype`, and NAME_scale_inv; else it is quantised as it is read
    kept: tuple[str, ...] = ()  # modules that the checkpoint has in another type, as its config names them

    def takes(self, tensor: str) -> bool:
        """Whether it covers a tensor of the checkpoint, MODULE.weight."""
        module = tensor.removesuffix(".weight")
        return module != tensor and not any(_names(pattern, module) for pattern in self.kept)

    def scales(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of the scales of a weight [out, in]."""
        rows, columns = self.block or (1, shape[1])
        return -(-shape[0] // rows), -(-shape[1] // columns)


def _names(pattern: str, module: str) -> bool:
    """As transformers reads `modules_to_not_convert`: the start of a path, as a regex too, or its end."""
    return bool(re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", module)) or module.endswith(pattern)


FLAG: Mapping[str, Quantisation] = {
    "int8": Quantisation("int8"),
    "fp8": Quantisation("float8_e4m3fn"),
    "fp8_per_block": Quantisation("float8_e4m3fn", BLOCK),
}


def named(name: str) -> Quantisation:
    """What `--quantization NAME` asks for."""
    if name not in FLAG:
        raise InvalidValue(f"quantization={name!r} must be one of {', '.join(FLAG)}", "quantization")
    return FLAG[name]


def chosen(stored: Quantisation | None, name: str | None) -> Quantisation | None:
    """What `--quantization NAME` makes of what the checkpoint has; None: it is not given."""
    if name is None:
        return stored
    how = named(name)
    if stored is not None and stored.dtype != how.dtype:
        raise InvalidValue(
            f"quantization={name!r}: the checkpoint is quantised already, to {stored.dtype}; leave it out",
            "quantization",
        )
    return stored or how


def read(config: Mapping[str, Any]) -> Quantisation | None:
    """What a config.json says of its weights; None: they are as its `dtype` says.

    Raises InvalidValue for a method that is not computed here.
    """
    given = config.get("quantization_config")
    if not given:
        return None
    method, form = given.get("quant_method"), given.get("fmt") or "e4m3"
    block = given.get("weight_block_size")
    whole = isinstance(block, (list, tuple)) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
    if method != "fp8" or form not in ("e4m3", "float8_e4m3fn") or not whole:
        raise InvalidValue(
            f"config.json: quantization_config of method {method!r} is not supported with fmt={form!r}, "
            f"weight_block_size={block!r}; supported are quant_method 'fp8' in e4m3 with weight_block_size "
            "[rows, columns], and unquantised float32, float16 and bfloat16 weights",
            "quantization_config",
        )
    kept = given.get("modules_to_not_convert") or ()
    return Quantisation("float8_e4m3fn", (int(block[0]), int(block[1])), True, tuple(map(str, kept)))
