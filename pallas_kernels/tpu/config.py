"""How the TPU kernels cut their work, and what vector memory that takes.

Letters: B page size, H query heads, K kv heads, D head dim, Q tokens of an item, C keys of a tile, R rows of a
stream's products (see kernel.py).
"""

from __future__ import annotations

from dataclasses import dataclass

SMEM = 2**20  # bytes of scalar memory of a core, v5e and v6e
VMEM = 128 * 2**20  # bytes of vector memory


@dataclass(frozen=True)
class Shape:
    """What a Config is checked against and its memory follows from. Bytes are of one element."""

    heads: int  # H
    kv_heads: int  # K
    dim: int  # D
    page: int  # B
    bytes: int = 2  # of q
    pool_bytes: int = 2


@dataclass(frozen=True)
class Config:
    """How the work is cut."""

    queries: int = 1  # Q
    keys: int = 256  # C, rounded up to whole pages
    mixed: bool = True
    vmem: int = 64 * 2**20  # bytes the compiler may use; a kernel that needs more does not compile

    def tile(self, page: int) -> int:
        """Pages of a tile."""
        return -(-self.keys // page)

    def streams(self, shape: Shape) -> int:
        return 1 if self.mixed else shape.kv_heads

    def rows(self, shape: Shape) -> int:
        """R"""
        return self.queries * shape.heads // self.streams(shape)

    def validate(self, shape: Shape) -> None:
        if self.queries < 1 or self.keys < 1:
            raise ValueError(f"{self.queries=} and {self.keys=} must be positive")
        if self.vmem > VMEM:
            raise ValueError(f"{self.vmem=} is more than the {VMEM} bytes of a core")
        if self.vmem_bytes(shape) > self.vmem:
            raise ValueError(f"{self} needs {self.vmem_bytes(shape)} bytes of VMEM for {shape}; {self.vmem=}")

    def vmem_bytes(self, shape: Shape) -> int:
        """Buffers, and the scores of one stream with their weights; the compiler adds what it spills."""
        keys = self.tile(shape.page) * shape.page  # C
        lanes = -(-shape.dim // 128) * 128
        pages = 2 * 2 * keys * shape.kv_heads * lanes * shape.pool_bytes
        wide = 0 if self.mixed else 2 * keys * shape.kv_heads * lanes * 4
        queries = self.streams(shape) * self.rows(shape)
        blocks = 2 * queries * (lanes * (shape.bytes + 4) + 128 * 4)  # q, out and lse come and go in two slots
        state = queries * (lanes + 2 * 128) * 4
        scores = 2 * self.rows(shape) * keys * (shape.kv_heads if self.mixed else 1) * 4
        return pages + wide + blocks + state + scores
