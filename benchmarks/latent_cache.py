"""Measure the attention error that an 8-bit latent cache (MLA) causes, against exact latents in float64.

Latents are synthetic, with DeepSeek's sizes (512 columns and 64 RoPE columns). As in the engine, scales are calibrated
on the first 256 tokens and applied to all. `alike`: all columns have similar magnitudes. `outliers`: one column in 64
is thirty times as large, RoPE columns included; queries weight all columns equally.
"""

from __future__ import annotations

import argparse
from typing import Any

import common
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxserve.engine.memory.calibrate import COLUMN_HEADROOM, TOKENS, rounded_up
from jaxserve.report.table import print_table
from pallas_kernels.ops.kv_write.xla import LARGEST, fitted

RANK, TURNED, HEADS, CONTEXT = 512, 64, 16, 8192
SHARP = 2.5  # standard deviation of scores: larger values focus heads on fewer tokens
Floats = npt.NDArray[np.float64]


def latents(outliers: bool) -> tuple[Floats, Floats]:
    """Return queries [H, D] and latents [C, D]."""
    random = np.random.default_rng(0)
    size = np.exp(random.normal(0.0, 0.3, RANK + TURNED))
    if outliers:
        size[::64] *= 30
    kept = random.standard_normal((CONTEXT, RANK + TURNED)) * size
    q = random.standard_normal((HEADS, RANK + TURNED)) / size
    return q * SHARP / np.sqrt(RANK + TURNED), kept


def attention(q: Floats, kept: Floats) -> Floats:
    """Return the attention outputs [H, R]."""
    score = q @ kept.T
    weight = np.exp(score - score.max(axis=1, keepdims=True))
    return (weight / weight.sum(axis=1, keepdims=True)) @ kept[:, :RANK]


def narrowed(kept: Floats, dtype: str, by: str) -> Floats:
    """Return the latents after storage in `dtype`, with scales per column, per part, or none."""
    scale: Floats = np.ones(RANK + TURNED)
    if by != "none":
        peak = np.abs(kept[:TOKENS]).max(axis=0)
        if by == "part":
            peak = np.concatenate([np.full(RANK, peak[:RANK].max()), np.full(TURNED, peak[RANK:].max())])
        scale = rounded_up((peak * COLUMN_HEADROOM[dtype] / LARGEST[dtype]).astype(np.float32)).astype(np.float64)
    stored = fitted(jnp.asarray(kept / scale, jnp.float32), jnp.dtype(dtype))
    return np.asarray(stored.astype(jnp.float32), np.float64) * scale


def measure(dtype: str, by: str) -> dict[str, Any]:
    found: dict[str, Any] = {"dtype": dtype, "scales": by}
    for name, outliers in (("alike", False), ("outliers", True)):
        q, kept = latents(outliers)
        want, got = attention(q, kept), attention(q, narrowed(kept, dtype, by))
        size = np.abs(kept[:, :RANK]).mean(axis=0)  # so that large columns do not hide the others
        found[name] = float(np.linalg.norm((got - want) / size) / np.linalg.norm(want / size))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_output(parser, "latent_cache")
    args = parser.parse_args()
    kinds = ("bfloat16", "none"), *((dtype, by) for dtype in ("float8_e4m3fn", "int8") for by in ("column", "part"))
    found = [measure(*kind) for kind in kinds]
    rows = [[row["dtype"], row["scales"], f"{row['alike']:.2%}", f"{row['outliers']:.2%}"] for row in found]
    print_table("mixed latents of one layer", ["kept in", "a scale for each", "error, alike", "error, outliers"], rows)
    common.save(args, {"forms": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
