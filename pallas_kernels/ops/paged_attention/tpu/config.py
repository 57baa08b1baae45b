"""How the TPU kernels split their work, the vector memory that takes, and which specs they support.

Letters: B page size, H query heads, K kv heads, D head dim, Q tokens of an item, C keys of a tile,
R rows of a stream's products (see kernel.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp

from pallas_kernels.ops.paged_attention.api import AttentionSpec
from pallas_kernels.ops.paged_attention.tpu.lanes import LANES, row_of

VMEM = 128 * 2**20  # bytes of vector memory of a v5e or v6e core
# Rows [C * K] of a tile. With 128 bf16 columns, its keys and values are 1 MiB together; at 819 GB/s they take about ten
# times as long to arrive as the scalar core takes to issue the copies.
TILE_ROWS = 2048
LEAST = 16  # tokens of an item of prefill
MIXED_ROWS = 128  # query rows up to which the compiler's schedule of a mixed tile is shorter


@dataclass(frozen=True)
class TpuShape:
    """The shapes that a config is checked against and its memory follows from; heads are those of one shard."""

    heads: int  # H
    kv_heads: int  # K
    dim: int  # D
    page: int  # B
    bytes: int = 2  # per element of q
    pool_bytes: int = 2  # per element of the pools


@dataclass(frozen=True)
class Config:
    """The block sizes of the kernel; kernel.py explains `mixed`."""

    queries: int = 1  # Q
    keys: int = 256  # C, rounded up to whole pages
    mixed: bool = True
    vmem: int = 96 * 2**20  # bytes the compiler may use; kernels that need more do not compile

    def pages(self, shape: TpuShape) -> int:
        """Return the pages of a tile."""
        return -(-self.keys // shape.page)

    def streams(self, shape: TpuShape) -> int:
        return 1 if self.mixed else shape.kv_heads

    def rows(self, shape: TpuShape) -> int:
        """Return R, the rows of a stream's products."""
        return self.queries * shape.heads // self.streams(shape)

    def validate(self, shape: TpuShape) -> None:
        """Raise ValueError, naming the field and what is allowed."""
        if self.queries < 1 or self.keys < 1:
            raise ValueError(f"{self.queries=} and {self.keys=} must be at least 1")
        if self.vmem > VMEM:
            raise ValueError(f"{self.vmem=} must be at most {VMEM}, the VMEM of a core")
        if (needed := self.vmem_bytes(shape)) > self.vmem:
            raise ValueError(f"{self} needs {needed} bytes of VMEM for {shape}; {self.vmem=} is the limit")

    def vmem_bytes(self, shape: TpuShape) -> int:
        """Estimate the buffers plus one stream's scores and weights.

        The compiler adds what it spills, so only compiling shows whether a kernel fits.
        """
        keys, lanes = self.pages(shape) * shape.page, -(-shape.dim // LANES) * LANES
        tile = keys * shape.kv_heads * lanes  # elements of keys, or of values
        fetched = 2 * 2 * tile * shape.pool_bytes  # two pools, two slots
        spread = 0 if self.mixed else 2 * tile * 4
        rows = self.streams(shape) * self.rows(shape)
        blocks = 2 * rows * (lanes * (shape.bytes + 4) + LANES * 4)  # q, out and lse, two slots each
        state = rows * (lanes + 2 * LANES) * 4
        scores = 2 * self.rows(shape) * keys * (shape.kv_heads if self.mixed else 1) * 4
        return fetched + spread + blocks + state + scores


def shape_of(spec: AttentionSpec) -> TpuShape:
    """Return the shapes that the kernels see."""
    row, sizes = row_of(spec), (jnp.dtype(dtype).itemsize for dtype in (spec.dtype, spec.stored))
    return TpuShape(spec.heads, spec.kv_heads // row.heads, row.width, spec.page, *sizes)


def decode_config(shape: TpuShape, queries: int = 1) -> Config:
    """Return a config for rows of up to `queries` tokens, each one item."""
    return Config(queries, tile_keys(shape), mixed=queries * shape.heads <= MIXED_ROWS)


def prefill_config(shape: TpuShape, queries: int = 64) -> Config:
    """Return a config with items of up to `queries` tokens, or fewer if vector memory does not hold that many heads.

    Longer items share the cost of reading a tile, but waste more at the ends of rows: a prompt of n
    tokens computes n^2 / 2 scores, plus the rest of the tiles on the diagonal.
    """
    config = Config(queries, tile_keys(shape), mixed=shape.kv_heads == 1)
    while config.queries > LEAST and 2 * config.vmem_bytes(shape) > config.vmem:
        config = replace(config, queries=config.queries // 2)
    return config


def supports(spec: AttentionSpec) -> str | None:
    """Return None, or the reason why decode and prefill cannot run `spec`.

    Whether a config fits VMEM is known to libtpu only.
    """
    if spec.platform != "tpu" and not spec.interpret:
        return f"it needs a TPU; this is {spec.platform}"
    if spec.latent:
        return "there is no TPU kernel for a latent KV cache (MLA)"
    if spec.dtype not in ("bfloat16", "float32"):
        return f"{spec.dtype} activations are not supported; bfloat16 and float32 are"
    if spec.stored not in (spec.dtype, "float8_e4m3fn", "int8"):
        return f"pools of {spec.stored}; {spec.dtype}, as the activations, float8_e4m3fn and int8 are supported"
    if spec.heads % spec.kv_heads or spec.kv_heads & (spec.kv_heads - 1):
        return (
            f"{spec.kv_heads} kv heads of {spec.heads} heads per shard; they must be a power of two that divides heads"
        )
    return None if spec.interpret else free_view(shape_of(spec))


def free_view(shape: TpuShape) -> str | None:
    """Return None, or the reason why reading a pool [N, B, K, D] as pages [B * K, D] would copy it.

    Such a pool would be copied whole at each layer. The rules follow XLA's default layouts, as
    compiled for v5e and v6e.
    """
    if shape.page % 16:
        return f"pages of {shape.page} tokens; a multiple of 16 is needed"
    if shape.dim % LANES or (shape.dim > LANES and shape.kv_heads % 8):
        return (
            f"head dim {shape.dim} with {shape.kv_heads} kv heads per shard and {8 * shape.pool_bytes}-bit pools; it "
            "must be 128, a multiple of 128 with a multiple of 8 kv heads, or 64 to 127 with unquantized pools"
        )
    if shape.kv_heads * shape.pool_bytes < 4:  # tokens would share 32-bit words, which XLA's layout does not allow
        return (
            f"{shape.kv_heads} kv heads per shard in {8 * shape.pool_bytes}-bit pools; those of a token must "
            f"fill 32-bit words, so at least {4 // shape.pool_bytes} are needed"
        )
    return None


def tile_keys(shape: TpuShape) -> int:
    """Return C for a tile of the bytes of `TILE_ROWS` bf16 rows of 128; at least a page."""
    rows = TILE_ROWS * 2 // max(shape.pool_bytes, 2) * LANES // max(shape.dim, LANES)
    return max(rows // shape.kv_heads, shape.page)
