"""Read integers and floats of 8 bits with scales: `weight` [out, in] and `weight_scale`, or `weight_scale_inv`.

Scales are one for the tensor, one for each output, group or block. Those that the engine holds are renamed to
`weight_scale_inv`, one for each output or block; other weights are widened. Scales of activations are not needed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.models.packed.computed import Array, Computed, Parts, Tensors, groups_of, replaced, widened
from jaxserve.models.packed.refused import refuse
from jaxserve.models.quantization import Quantization

log = logging.getLogger(__name__)

VALUES = ("F8_E4M3", "I8")
SCALE, INVERSE, ZERO = ".weight_scale", ".weight_scale_inv", ".weight_zero_point"
# Of activations, and of keys and values, which the engine has its own for.
UNUSED = re.compile(r".*\.((in|out)put_(scale|zero_point|scale_ub)|activation_scale|(q|k|v|kv)_(scale|zero_point))")


def quantization(method: str, dtype: str, block: Any, ignored: Any) -> Quantization:
    """Return a stored quantization. block: of outputs and inputs with a scale. ignored: modules left wide."""
    if block is not None and not (
        isinstance(block, Sequence) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)
    ):
        refuse(method, f"blocks of {block!r}")
    return Quantization(dtype, None if block is None else (block[0], block[1]), True, patterns(method, ignored or ()))


def patterns(method: str, names: Sequence[Any]) -> tuple[str, ...]:
    """Return modules' names as regular expressions, of which compressed-tensors marks its own by `re:`."""
    found = tuple(f"(?:{name[3:]}).*" if str(name).startswith("re:") else str(name) for name in names)
    for name, pattern in zip(names, found, strict=True):
        try:
            re.compile(pattern)
        except re.error:
            refuse(method, f"the module {name!r}")
    return found


@dataclass(frozen=True)
class Fp8:
    """The methods whose weights are all float8: `fp8` and `fbgemm_fp8`."""

    method: str

    def declared(self, given: Mapping[str, Any]) -> Quantization:
        """See `methods.Method`."""
        form = given.get("fmt") or "e4m3"
        if form not in ("e4m3", "float8_e4m3fn"):
            refuse(self.method, f"fmt={form!r}")
        ignored = [*(given.get("modules_to_not_convert") or ()), *(given.get("ignored_layers") or ())]
        return quantization(self.method, "float8_e4m3fn", given.get("weight_block_size"), ignored)

    def unpacked(self, tensors: Tensors, given: Mapping[str, Any]) -> dict[str, tuple[Path, Any]]:
        return unpacked(tensors, self.declared(given))


def unpacked(tensors: Tensors, how: Quantization | None, size: int = 0) -> dict[str, tuple[Path, Any]]:
    """Rename the scales of weights that are held as they are stored, and widen others. size: inputs of a group."""
    used = {name: at for name, at in tensors.items() if not UNUSED.fullmatch(name)}
    if len(used) < len(tensors):
        text = "%d scales of activations, keys and values are not used: see --dtype and --kv-cache-dtype"
        log.info(text, len(tensors) - len(used))
    for scale in (SCALE, INVERSE):
        used = replaced(used, (".weight", scale), (ZERO,), partial(_views, how, size, scale))
    return used


def _views(how: Quantization | None, size: int, scale: str, parts: Parts) -> dict[str, Computed] | None:
    if parts.dtype(".weight") not in VALUES or len(parts.shape(".weight")) != 2:
        return None
    outputs, inputs = parts.shape(".weight")
    shape, dtype = parts.shape(scale), parts.dtype(scale)
    groups = shape[1] if len(shape) == 2 else 1
    if how is not None:
        wanted = (outputs, 1) if how.block is None and int(np.prod(shape)) in (1, outputs) else shape
        return {
            ".weight": parts.computed((outputs, inputs), parts.dtype(".weight"), _symmetric),
            INVERSE: parts.computed(wanted, dtype, lambda read: _for_each(read[scale], wanted)),
        }

    def compute(read: dict[str, Array]) -> Array:
        scales = _for_each(read[scale], (outputs, groups))
        zeros = read[ZERO].astype(np.int16) if ZERO in read else np.zeros(1, np.int16)
        group = groups_of(inputs, groups, size, None)
        return widened(read[".weight"], scales, _for_each(zeros, (outputs, groups)), group)

    if not groups or int(np.prod(shape)) not in (1, outputs * groups):
        return None
    return {".weight": parts.computed((outputs, inputs), dtype, compute)}


def _symmetric(read: dict[str, Array]) -> Array:
    check_symmetric(read.get(ZERO, np.zeros(())))
    return read[".weight"]


def check_symmetric(zeros: Array) -> None:
    """Raise ValueError for zero points of a weight that is held without them."""
    if np.any(zeros):
        raise ValueError("it has zero points, but config.json says it is symmetric")


def _for_each(scales: Array, shape: tuple[int, ...]) -> Array:
    """Return scales in a shape, to which one for the tensor is repeated."""
    return np.broadcast_to(scales.reshape(-1, 1) if scales.size in (1, shape[0]) else scales, shape)
