"""Read compressed-tensors: what llm-compressor writes.

pack-quantized: `weight_packed` [out, in * bits / 32] int32, integers less their smallest, low bits first, with
`weight_shape` [2], `weight_scale` [out, G], and for asymmetric ones `weight_zero_point` [out * bits / 32, G], packed
along the outputs; the first versions stored them in int8 [out, G]. Inputs ordered by their activations have
`weight_g_idx` [in], of which -1 says that they are not.
int-quantized and float-quantized: see `eight`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.models.packed import eight
from jaxserve.models.packed.computed import (
    Array,
    Computed,
    Parts,
    Tensors,
    fields,
    groups_of,
    replaced,
    size_of,
    widened,
)
from jaxserve.models.packed.refused import refuse
from jaxserve.models.quantization import Quantization

log = logging.getLogger(__name__)

NEEDED, OPTIONAL = (".weight_packed", ".weight_scale", ".weight_shape"), (".weight_zero_point", ".weight_g_idx")
FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
METHOD = "compressed-tensors"


def declared(given: Mapping[str, Any]) -> Quantization | None:
    """See `methods.Method`."""
    if (given.get("sparsity_config") or {}).get("format", "dense") != "dense":
        refuse(METHOD, f"sparsity_config of format {given['sparsity_config']['format']!r}")
    if given.get("transform_config"):
        refuse(METHOD, "transform_config, which rotates activations")
    groups = _groups(given)
    if not groups:
        refuse(METHOD, "no config_groups")
    for group in groups:
        form, weights = group.get("format") or given.get("format"), group.get("weights") or {}
        bits, kind = weights.get("num_bits"), weights.get("type")
        if form not in FORMATS:
            refuse(METHOD, f"format={form!r}")
        if bits not in ((4, 8) if form == "pack-quantized" else (8,)) or kind not in ("int", "float"):
            refuse(METHOD, f"weights of {bits!r} bits of type {kind!r} in format={form!r}")
    weights = groups[0]["weights"]
    size_of(weights)
    if len(groups) > 1 or "Linear" not in (groups[0].get("targets") or ()):
        return None
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    if weights["num_bits"] != 8 or strategy not in ("tensor", "channel", "block") or not weights.get("symmetric", True):
        return None
    dtype = "float8_e4m3fn" if weights["type"] == "float" else "int8"
    return eight.quantization(METHOD, dtype, block if strategy == "block" else None, given.get("ignore"))


def unpacked(tensors: Tensors, given: Mapping[str, Any]) -> dict[str, tuple[Path, Any]]:
    how = declared(given)
    if given.get("kv_cache_scheme"):
        log.info("kv_cache_scheme is not used: keys and values are held as --kv-cache-dtype says")
    readable = replaced(tensors, NEEDED, OPTIONAL, partial(_views, how is not None))
    return eight.unpacked(readable, how, size_of(_groups(given)[0]["weights"]))


def _groups(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((given.get("config_groups") or {}).values())


def _views(stored: bool, parts: Parts) -> dict[str, Computed] | None:
    shapes = parts.shape(".weight_packed"), parts.shape(".weight_scale")
    if parts.shape(".weight_shape") != (2,) or [len(shape) for shape in shapes] != [2, 2]:
        return None
    (rows, words), (_, groups) = shapes
    outputs, inputs = (int(size) for size in parts.tensor(".weight_shape"))
    bits = next((bits for bits in (4, 8) if -(-inputs * bits // 32) == words), 0)
    if rows != outputs or shapes[1][0] != outputs or not bits or not groups or inputs % groups:
        return None

    def compute(read: dict[str, Array]) -> Array:
        values, index = fields(read[".weight_packed"], bits)[:, :inputs], read.get(".weight_g_idx")
        group = groups_of(inputs, groups, 0, None if index is None or -1 in index else index)
        return widened(values, read[".weight_scale"], _zeros(read, (outputs, groups), bits), group)

    def signed(read: dict[str, Array]) -> Array:
        eight.check_symmetric(_zeros(read, (outputs, groups), bits) - 128)
        return (fields(read[".weight_packed"], 8)[:, :inputs] ^ 128).view(np.int8)

    if stored and bits == 8 and groups == 1:
        exact = parts.computed((outputs, inputs), "I8", signed)
        scale = parts.computed((outputs, 1), parts.dtype(".weight_scale"), lambda read: read[".weight_scale"])
        return {".weight": exact, ".weight_scale": scale}
    return {".weight": parts.computed((outputs, inputs), parts.dtype(".weight_scale"), compute)}


def _zeros(read: dict[str, Array], shape: tuple[int, int], bits: int) -> Array:
    """Return the zeros [out, G] of integers that are stored less their smallest. Raises ValueError."""
    smallest, stored = 1 << (bits - 1), read.get(".weight_zero_point")
    if stored is None:
        return np.full(shape, smallest, np.int16)
    if stored.dtype == np.int8 and stored.shape == shape:  # not packed
        return stored.astype(np.int16) + smallest
    if stored.shape != (-(-shape[0] * bits // 32), shape[1]):
        raise ValueError(
            f"its zero points {list(stored.shape)} must be those of {shape[0]} outputs in {shape[1]} groups"
        )
    return fields(stored.T, bits)[:, : shape[0]].T.astype(np.int16)
