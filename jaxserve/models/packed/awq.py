"""Read AWQ tensors of the form GEMM: integers of 4 bits in words along the outputs, interleaved.

A checkpoint has `qweight` [in, out / 8], `qzeros` [G, out / 8] and `scales` [G, out]. The fields of a word, low bits
first, are outputs 0, 2, 4, 6, 1, 3, 5 and 7 of eight.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.models.packed.computed import Array, Computed, Parts, Tensors, fields, groups_of, replaced, widened
from jaxserve.models.packed.refused import refuse

NEEDED = (".qweight", ".qzeros", ".scales")
FIELD = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # of each output of eight


def declared(given: Mapping[str, Any]) -> None:
    """See `methods.Method`."""
    bits, form = given.get("bits", given.get("w_bit")), given.get("version") or given.get("format") or "gemm"
    if bits != 4:
        refuse("awq", f"bits={bits!r}")
    if str(form).lower() != "gemm":
        refuse("awq", f"version={form!r}")
    if given.get("zero_point") is False:
        refuse("awq", "zero_point=False")


def unpacked(tensors: Tensors, given: Mapping[str, Any]) -> dict[str, tuple[Path, Any]]:
    return replaced(tensors, NEEDED, (), _views)


def _views(parts: Parts) -> dict[str, Computed] | None:
    if len(parts.shape(".qweight")) != 2 or len(parts.shape(".scales")) != 2:
        return None
    (inputs, words), (groups, outputs) = parts.shape(".qweight"), parts.shape(".scales")
    if parts.shape(".qzeros") != (groups, words) or words * 8 != outputs or not groups or inputs % groups:
        return None

    def compute(read: dict[str, Array]) -> Array:
        values, zeros = (_outputs(read[end]).T for end in (".qweight", ".qzeros"))
        return widened(values, read[".scales"].T, zeros, groups_of(inputs, groups, 0, None))

    return {".weight": parts.computed((outputs, inputs), parts.dtype(".scales"), compute)}


def _outputs(words: Array) -> Array:
    """Unpack words [N, out / 8] to [N, out]."""
    return fields(words, 4).reshape(len(words), -1, 8)[:, :, FIELD].reshape(len(words), -1)
