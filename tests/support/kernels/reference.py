"""The reference for every attention kernel: the dense formula in float64 numpy.

    score[t, h, j] = cap(scale * q[t, h] . k[j, h // G]),  cap(x) = softcap * tanh(x / softcap)
    out[t, h] = sum_j softmax_j(score) v[j, h // G]
    lse[t, h] = log sum_j exp(score)

over the keys j of t's own row with p - window < j <= p, for t's position p: a window of w sees w
keys, its own included. A quantized pool stores key / scale of its kv head. A sink joins the sum of
softmax_j without a value, and not lse. Tokens that see no key give zeros and MASKED.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pallas_kernels.layout import MASKED, Ragged, Scales

Doubles = npt.NDArray[np.float64]
LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}  # largest quantized value


def doubles(x: Any) -> Doubles:
    """Convert any jax or numpy array, also of bfloat16 or float8, to float64."""
    return np.asarray(x).astype(np.float64)


def attention(
    q: Any,  # [T, H, D]
    k_pool: Any,  # [N, B, K, D]
    v_pool: Any,  # [N, B, K, D]
    ragged: Ragged,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    scales: Scales | None = None,
    sinks: Any = None,  # [H]
) -> tuple[Doubles, Doubles]:
    """Return mixed values [T, H, D] and lse [T, H] of every token of every row."""
    tokens, heads, dim = q.shape
    kv_heads = k_pool.shape[2]
    out, lse = np.zeros((tokens, heads, dim)), np.full((tokens, heads), MASKED)
    starts, lengths, contexts, tables = (np.asarray(x) for x in (*ragged[3:6], ragged.block_tables))
    grouped = doubles(q).reshape(tokens, kv_heads, -1, dim)
    for start, length, context, table in zip(starts, lengths, contexts, tables, strict=True):
        if not length:
            continue
        k, v = _row(k_pool, table, context), _row(v_pool, table, context)  # [context, K, D]
        if scales is not None:
            k, v = k * doubles(scales.k)[:, None], v * doubles(scales.v)[:, None]
        here = slice(start, start + length)
        score = scale * np.einsum("tkgd,jkd->tkgj", grouped[here], k)
        if softcap is not None:
            score = softcap * np.tanh(score / softcap)
        position, key = np.arange(context - length, context)[:, None], np.arange(context)
        seen = (key <= position) & (True if window is None else key > position - window)  # [length, context]
        score = np.where(seen[:, None, None], score, -np.inf)
        peak = score.max(-1, keepdims=True)
        weight = np.exp(score - peak)
        total = weight.sum(-1, keepdims=True)
        sunk = 0.0 if sinks is None else np.exp(doubles(sinks).reshape(1, kv_heads, -1, 1) - peak)
        out[here] = np.einsum("tkgj,jkd->tkgd", weight / (total + sunk), v).reshape(length, heads, dim)
        lse[here] = (peak + np.log(total)).reshape(length, heads)
    return out, lse


def _row(pool: Any, table: npt.NDArray[np.int32], context: int) -> Doubles:
    """Return the keys or values of one row in order, [context, K, D]; the rest of its pages is not read."""
    pages = table[: -(-context // pool.shape[1])]
    return doubles(np.asarray(pool)[pages]).reshape(-1, *pool.shape[2:])[:context]


def rotate(x: Any, turn: tuple[Any, Any]) -> Doubles:
    """Rotate the pairs (i, i + D/2) of x [T, heads, D] by cos, sin [T, 1, D/2]."""
    left, right = np.split(doubles(x), 2, axis=-1)
    cos, sin = (doubles(part) for part in turn)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def quantized(x: Any, scale: Any, dtype: Any) -> npt.NDArray[Any]:
    """Quantize x [..., K, D] as a pool of `dtype` does: x / scale[K], rounded to even and clipped."""
    largest = LARGEST[np.dtype(dtype).name]
    # In float32, as in the kernels: a tie in float64 need not be a tie there.
    small = np.clip(np.asarray(x).astype(np.float32) / np.asarray(scale, np.float32)[:, None], -largest, largest)
    return (np.rint(small) if np.issubdtype(dtype, np.integer) else small).astype(dtype)


def written(pool: Any, new: Any, where: Any) -> npt.NDArray[Any]:
    """Return the pool [N, B, K, D] with new [T, K, D] at `where` [T] (page * B + offset); drop out-of-range ones."""
    after = np.asarray(pool).copy()
    flat = after.reshape(-1, *after.shape[2:])
    where = np.asarray(where)
    kept = where < len(flat)
    flat[where[kept]] = np.asarray(new)[kept].astype(after.dtype)
    return after


def error(got: Any, want: Any) -> float:
    """Return ||got - want|| / ||want||; a `want` of zeros must be matched exactly."""
    got, want = doubles(got), doubles(want)
    assert got.shape == want.shape, f"{got.shape=} {want.shape=}"
    assert np.all(np.isfinite(got)), "not every value is finite"
    return float(np.linalg.norm(got - want)) / max(float(np.linalg.norm(want)), 1e-30)
