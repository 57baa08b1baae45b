"""Read GPTQ tensors: integers of 4 or 8 bits in words along the inputs, with a scale and a zero for each group.

A checkpoint has `qweight` [in * bits / 32, out], `qzeros` [G, out * bits / 32], `scales` [G, out], and `g_idx` [in],
the group of each input, which is no simple sequence if the inputs were quantized in the order of their activations
(`desc_act`). Zeros are stored less 1, except in the form `gptq_v2`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxserve.models.packed.computed import Array, Computed, Parts, Tensors, fields, groups_of, replaced, widened
from jaxserve.models.packed.refused import refuse

NEEDED, OPTIONAL = (".qweight", ".qzeros", ".scales"), (".g_idx",)
BITS = (4, 8)


def declared(given: Mapping[str, Any]) -> None:
    """See `methods.Method`."""
    bits, form = given.get("bits"), given.get("checkpoint_format") or given.get("format") or "gptq"
    if bits not in BITS:
        refuse("gptq", f"bits={bits!r}")
    if form not in ("gptq", "gptq_v2") or given.get("is_marlin_format"):
        refuse("gptq", f"checkpoint_format={'marlin' if given.get('is_marlin_format') else form!r}")


def unpacked(tensors: Tensors, given: Mapping[str, Any]) -> dict[str, tuple[Path, Any]]:
    less = 0 if "gptq_v2" in (given.get("checkpoint_format"), given.get("format")) else 1
    return replaced(tensors, NEEDED, OPTIONAL, partial(_views, less, int(given.get("group_size") or -1)))


def _views(less: int, size: int, parts: Parts) -> dict[str, Computed] | None:
    if len(parts.shape(".qweight")) != 2 or len(parts.shape(".qzeros")) != 2:
        return None
    (words, outputs), (groups, columns) = parts.shape(".qweight"), parts.shape(".qzeros")
    bits = columns * 32 // max(outputs, 1)  # some checkpoints have several
    if bits not in BITS or parts.shape(".scales") != (groups, outputs):
        return None
    inputs = words * 32 // bits

    def compute(read: dict[str, Array]) -> Array:
        zeros = (fields(read[".qzeros"], bits) + less) & (2**bits - 1)
        group = groups_of(inputs, groups, size, read.get(".g_idx"))
        return widened(fields(read[".qweight"].T, bits), read[".scales"].T, zeros.T, group)

    return {".weight": parts.computed((outputs, inputs), parts.dtype(".scales"), compute)}
