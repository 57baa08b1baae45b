"""Write checkpoints in the published forms of GPTQ, AWQ, compressed-tensors and FP8, weights rounded to nearest."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Tensors = dict[str, Array]
LINEAR = ("_proj.weight", "_proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")
AWQ_OUTPUTS = [0, 2, 4, 6, 1, 3, 5, 7]  # of eight, in the order of a word's fields


def words(values: Array, bits: int) -> Array:
    """Pack integers [..., N] into int32 [..., N * bits / 32], low bits first."""
    fields = values.astype(np.uint32).reshape(*values.shape[:-1], -1, 32 // bits)
    return np.bitwise_or.reduce(fields << np.arange(0, 32, bits, dtype=np.uint32), axis=-1).view(np.int32)


def rounded(weight: Array, bits: int, size: int, *, symmetric: bool, group: Array | None = None) -> list[Array]:
    """Return integers [out, in], scales and zeros [out, G], the group of each input, and the rounded weight."""
    inputs, top = weight.shape[1], 2**bits - 1
    index = np.arange(inputs) // (inputs if size == -1 else size) if group is None else group
    parts = [weight[:, index == i] for i in range(index.max() + 1)]
    low, high = (np.stack([end(part, axis=1) for part in parts], 1) for end in (np.min, np.max))
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    if symmetric:
        scales, zeros = 2 * np.maximum(-low, high) / top, np.full(low.shape, (top + 1) // 2)
    else:
        scales, zeros = (high - low) / top, np.rint(-low * top / (high - low))
    scales = scales.astype(np.float16)
    wide = scales.astype(np.float32)[:, index]
    values = np.clip(np.rint(weight / wide) + zeros[:, index], 0, top)
    back = (values - zeros[:, index]) * wide
    return [values.astype(np.uint8), scales, zeros.astype(np.uint8), index.astype(np.int32), back]


def _ordered(weight: Array, size: int) -> Array:
    """Return the group of each input if the inputs are quantized in another order (act-order)."""
    return np.random.default_rng(0).permutation(weight.shape[1]) // size


def gptq(
    weight: Array, *, bits: int = 4, size: int = 16, symmetric: bool = True, order: bool = False, less: int = 1
) -> Tensors:
    """Pack a weight. less: what zeros are stored less, which is nothing in the form `gptq_v2`."""
    group = _ordered(weight, size) if order else None
    values, scales, zeros, index, back = rounded(weight, bits, size, symmetric=symmetric, group=group)
    stored = ((zeros.astype(np.int32) - less) & (2**bits - 1)).T
    return {
        "qweight": words(values, bits).T, "qzeros": words(stored, bits), "scales": scales.T, "g_idx": index,
        "": back.astype(np.float16),
    }  # fmt: skip


def awq(weight: Array, *, size: int = 16) -> Tensors:
    values, scales, zeros, _, back = rounded(weight, 4, size, symmetric=False)
    interleaved = (x.T.reshape(x.shape[1], -1, 8)[:, :, AWQ_OUTPUTS].reshape(x.shape[1], -1) for x in (values, zeros))
    qweight, qzeros = (words(x, 4) for x in interleaved)
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales.T, "": back.astype(np.float16)}


def pack_quantized(
    weight: Array, *, bits: int = 4, size: int = 16, symmetric: bool = True, order: bool = False
) -> Tensors:
    group = _ordered(weight, size) if order else None
    values, scales, zeros, index, back = rounded(weight, bits, size, symmetric=symmetric, group=group)
    shape = np.array(weight.shape, np.int64)
    back = back.astype(np.float32 if bits == 8 else np.float16)
    packed = {"weight_packed": words(values, bits), "weight_scale": scales, "weight_shape": shape, "": back}
    packed |= {"weight_g_idx": index} if order else {}
    return packed if symmetric else packed | {"weight_zero_point": words(zeros.T, bits).T}


def float_quantized(weight: Array, *, whole: bool = False) -> Tensors:
    peak = np.abs(weight).max(keepdims=True) if whole else np.abs(weight).max(axis=1, keepdims=True)
    scale = (peak / 448).astype(np.float32)
    values = (weight / scale).astype(ml_dtypes.float8_e4m3fn)
    back = values.astype(np.float32) * scale
    return {"weight": values, "weight_scale": scale.reshape(()) if whole else scale, "": back}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


def write(
    folder: Path, pack: Callable[[Array], Tensors], config: Mapping[str, Any], extra: Mapping[str, Array] | None = None
) -> Tensors:
    """Rewrite a folder's projections and experts in a packing; return all tensors, dequantized."""
    from safetensors.numpy import load_file

    (file,) = folder.glob("*.safetensors")
    held: Tensors = dict(extra or {})
    wide: Tensors = {}
    for name, tensor in load_file(file).items():
        if tensor.ndim != 2 or not name.endswith(LINEAR):
            held[name] = wide[name] = tensor
            continue
        parts = pack(tensor.astype(np.float32))
        wide[name] = parts.pop("")
        held |= {name.removesuffix("weight") + end: part for end, part in parts.items()}
    save(held, file)
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**whole, "quantization_config": config}))
    return wide


def save(tensors: Tensors, file: Path) -> None:
    """Write the file with torch, since the numpy side of safetensors has no 8-bit floats."""
    import torch
    from safetensors.torch import save_file

    made = {}
    for name, x in tensors.items():
        if x.dtype == ml_dtypes.float8_e4m3fn:
            made[name] = torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn)
        elif x.dtype == ml_dtypes.bfloat16:
            made[name] = torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
        else:
            made[name] = torch.from_numpy(np.ascontiguousarray(x))
    save_file(made, file)
