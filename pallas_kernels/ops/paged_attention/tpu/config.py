"""How the TPU kernels cut their work, what vector memory that takes, and what they can run at all.

Letters: B page size, H query heads, K kv heads, D head dim, Q tokens of an item, C keys of a tile, R rows of a
stream's products (see kernel.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.ops.paged_attention.api import Spec
from pallas_kernels.ops.paged_attention.tpu.lanes import LANES, row_of

VMEM = 128 * 2**20  # bytes of vector memory of a core, v5e and v6e
# Rows [C * K] of a tile. Keys and values of 128 bf16 are then 1 MiB: at 819 GB/s as long under way as the scalar core
# takes to ask for them some ten times over.
TILE_ROWS = 2048
MIXED_ROWS = 128  # of queries; up to so many, the compiler's schedule of a mixed tile is shorter than of one apart


@dataclass(frozen=True)
class Shape:
    """What a config is checked against and its memory follows from. Heads are those of one shard."""

    heads: int  # H
    kv_heads: int  # K
    dim: int  # D
    page: int  # B
    bytes: int = 2  # of an element of q
    pool_bytes: int = 2


@dataclass(frozen=True)
class Config:
    """`mixed` and apart: see kernel.py."""

    queries: int = 1  # Q
    keys: int = 256  # C, rounded up to whole pages
    mixed: bool = True
    vmem: int = 96 * 2**20  # bytes the compiler may use; a kernel that needs more does not compile

    def pages(self, shape: Shape) -> int:
        """Of a tile."""
        return -(-self.keys // shape.page)

    def streams(self, shape: Shape) -> int:
        return 1 if self.mixed else shape.kv_heads

    def rows(self, shape: Shape) -> int:
        """R"""
        return self.queries * shape.heads // self.streams(shape)

    def validate(self, shape: Shape) -> None:
        """Raises ValueError with the field and what is allowed."""
        if self.queries < 1 or self.keys < 1:
            raise ValueError(f"{self.queries=} and {self.keys=} must be at least 1")
        if self.vmem > VMEM:
            raise ValueError(f"{self.vmem=} must be at most {VMEM}, what a core has")
        if (needed := self.vmem_bytes(shape)) > self.vmem:
            raise ValueError(f"{self} needs {needed} bytes of VMEM for {shape}, {self.vmem=} are allowed")

    def vmem_bytes(self, shape: Shape) -> int:
        """Buffers, and a stream's scores and weights. The compiler adds what it spills, and has the last word."""
        keys, lanes = self.pages(shape) * shape.page, -(-shape.dim // LANES) * LANES
        tile = keys * shape.kv_heads * lanes  # elements of keys, or of values
        fetched = 2 * 2 * tile * shape.pool_bytes  # two pools, two slots
        spread = 0 if self.mixed else 2 * tile * 4
        rows = self.streams(shape) * self.rows(shape)
        blocks = 2 * rows * (lanes * (shape.bytes + 4) + LANES * 4)  # q, out and lse, two slots each
        state = rows * (lanes + 2 * LANES) * 4
        scores = 2 * self.rows(shape) * keys * (shape.kv_heads if self.mixed else 1) * 4
        return fetched + spread + blocks + state + scores


def shape_of(spec: Spec, pool_dtype: Any = None) -> Shape:
    """Of what the kernels see. `pool_dtype` where it is not that of the activations."""
    own = jnp.dtype(spec.dtype)
    stored = own if pool_dtype is None else jnp.dtype(pool_dtype)
    row = row_of(spec)
    return Shape(spec.heads, spec.kv_heads // row.heads, row.width, spec.page, own.itemsize, stored.itemsize)


def supports(spec: Spec) -> str | None:
    """None, or why decode and prefill cannot run it. Libtpu, not this page, knows whether a config fits VMEM."""
    if spec.platform != "tpu" and not spec.interpret:
        return f"it is for TPUs; this is {spec.platform}"
    if spec.latent:
        return "its kernels read keys and values; there is none yet for a latent KV cache (MLA)"
    if spec.dtype not in ("bfloat16", "float32"):
        return f"{spec.dtype} is not computed on a TPU; bfloat16 and float32 are"
    if spec.stored not in (spec.dtype, "float8_e4m3fn", "int8"):
        return f"pools of {spec.stored}: they are {spec.dtype} as the activations, float8_e4m3fn or int8"
    if spec.heads % spec.kv_heads or spec.kv_heads & (spec.kv_heads - 1):
        return f"{spec.kv_heads} kv heads of {spec.heads} heads a shard: a power of two is needed, and whole groups"
    return None if spec.interpret else free_view(shape_of(spec, spec.stored))


def free_view(shape: Shape) -> str | None:
    """None, or why a pool [N, B, K, D] does not lie in memory as its pages are read, [B * K, D]: it would be copied
    whole at each layer. As XLA lays out arrays by default, seen in what it compiles for v5e and v6e."""
    if shape.page % 16:
        return f"pages of {shape.page} tokens: a multiple of 16 is needed"
    if shape.dim % LANES or (shape.dim > LANES and shape.kv_heads % 8):
        return (
            f"head dim {shape.dim} with {shape.kv_heads} kv heads a shard and pools of {8 * shape.pool_bytes} bits: it "
            "must be 128, a multiple of 128 with a multiple of 8 kv heads, or 64 to 127 with pools as the activations"
        )
    if shape.kv_heads * shape.pool_bytes < 4:  # tokens would share words of 32 bits, and XLA lets them share none
        return (
            f"{shape.kv_heads} kv heads a shard in pools of {8 * shape.pool_bytes} bits an element: a token's must "
            f"fill words of 32 bits, {4 // shape.pool_bytes} heads are needed"
        )
    return None


def tile_keys(shape: Shape) -> int:
    """C of a tile of `TILE_ROWS` rows, of as many bytes for other types; at least a page."""
    rows = TILE_ROWS * 2 // max(shape.pool_bytes, 2) * LANES // max(shape.dim, LANES)
    return max(rows // shape.kv_heads, shape.page)
