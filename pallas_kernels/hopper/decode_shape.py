"""The names of a block of decode attention: what is static, what it gets, and the items that it takes.

Letters: M rows of the product (query tokens times G, padded), C = tokens of keys in a tile, D head dim, R columns of
the values (D, but of a latent), B page size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import plgpu
from pallas_kernels.hopper import fragments
from pallas_kernels.interpret import Interpret

MEETING = 64  # columns that warps with keys of their own add up at a time


@dataclass(frozen=True)
class Shape:
    """All that is static about the blocks."""

    rows: int  # M
    packed: int  # rows of q that are copied; the others hold what was there, and are not read in the end
    group: int  # G
    block: int  # query tokens in a block
    dim: int
    page: int
    tile: int  # C
    stages: int
    consumers: int
    dtype: Any  # of the products
    kv_dtype: Any  # of the pools
    warps: bool  # products of warps (mma), not of the warpgroup (wgmma)
    p_in_smem: bool
    scale: float
    window: int | None
    softcap: float | None
    scaled: bool
    interpret: Interpret
    latent: int = 0  # R, where the first columns of the keys are the values; 0: values have a pool of their own

    @property
    def values(self) -> int:
        """R, columns of the values."""
        return self.latent or self.dim

    @property
    def joint(self) -> bool:
        """Whether two consumers compute every tile together, for the rows of all its values are too wide for one."""
        return bool(self.latent) and (not self.warps or self.parted)

    @property
    def width(self) -> int:
        """Columns of the values that one product of a consumer has."""
        if self.joint and not self.parted:
            return self.latent // self.consumers
        return (64 if self.mixed % 128 else 128) if self.latent else self.dim

    @property
    def mixed(self) -> int:
        """Columns of the values that a consumer mixes."""
        return self.latent // self.consumers if self.joint else self.values

    @property
    def slots(self) -> int:
        """Slots of the ring that a tile takes."""
        return self.consumers if self.joint and not self.parted else 1

    def place(self, tile: Any, part: Any = 0) -> Any:
        """The slot of a part of the `tile`th tile of a block.

        Parts change places from tile to tile: of a slot that is known beforehand the compiler works out every address
        of the products before the loop over tiles, and holds them in registers that it lacks.
        """
        slot = lax.rem(tile, self.stages // self.slots)
        return slot if self.slots == 1 else slot * self.slots + lax.rem(tile + part, self.slots)

    @property
    def slot(self) -> int:
        """Tokens of keys in a slot."""
        return self.tile // self.slots

    @property
    def partials(self) -> int:
        """Partial results of an item."""
        return 1 if self.joint else self.consumers

    @property
    def queues(self) -> int:
        """Items whose queries are there at a time."""
        return 1 if self.joint and not self.parted else 2

    @property
    def quantised(self) -> bool:
        return bool(self.kv_dtype != self.dtype)

    @property
    def parted(self) -> bool:
        """Whether the four warps of a consumer have keys of their own, each with all rows (decode_bytes.py)."""
        return self.quantised and self.warps

    @property
    def pages(self) -> int:
        """Pages, or the part of one, that make up a tile."""
        return max(1, self.tile // self.page)

    @property
    def copies(self) -> int:
        """Pages, or the part of one, that make up a slot: copies, and arrivals at its barrier."""
        return max(1, self.slot // self.page)

    def layout(self, operand: str, dtype: Any = None) -> Any:
        """Registers of an operand of the product: "LHS", "RHS" or "ACC"."""
        if not self.warps or self.parted:
            return plgpu.Layout.WGMMA
        return getattr(plgpu.Layout, f"MMA_{operand}")(dtype or self.dtype, m_warps=min(4, self.rows // 16))

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers of a block."""
        ring = (self.stages, self.slot, self.dim)
        sides = ("k",) if self.latent else ("k", "v")
        memory = {"q": _tiled((self.queues, self.rows, self.dim), self.dtype)}
        barriers = {
            "q_full": plgpu.Barrier(num_arrivals=1, num_barriers=self.queues),
            "q_free": plgpu.Barrier(num_arrivals=self.consumers, num_barriers=self.queues),
        }
        for side in sides:
            most = fragments.KEY_SWIZZLE if self.parted and side == "k" else 128
            memory[side] = _tiled(ring, self.kv_dtype, most)
            barriers[f"{side}_full"] = plgpu.Barrier(num_arrivals=self.copies, num_barriers=self.stages)
            barriers[f"{side}_free"] = plgpu.Barrier(
                num_arrivals=self.consumers if self.joint else 1, num_barriers=self.stages
            )
        if self.parted:
            memory["told"] = plgpu.SMEM((self.consumers, 128), jnp.float32)
            memory["met"] = _meeting(self.consumers)
        elif self.joint:
            memory["told"] = plgpu.SMEM((self.consumers, self.rows), jnp.float32)
            barriers["met"] = plgpu.Barrier(num_arrivals=self.consumers, num_barriers=2)
        elif self.warps or self.p_in_smem:
            memory["p"] = _tiled((self.consumers, self.rows, self.tile), self.dtype)
        if self.quantised and not self.parted:
            memory["wide"] = _tiled((self.consumers, self.tile, self.dim), self.dtype)
        return memory | barriers


def _meeting(consumers: int) -> Any:
    """Where warps add up; rows are longer than what is in them, so that their banks differ."""
    return plgpu.SMEM((consumers, 64, MEETING + 8), jnp.float32)


def _tiled(shape: tuple[int, ...], dtype: Any, most: int = 128) -> Any:
    """Shared memory as TMA and the tensor cores like it: 8 rows of up to 128 bytes, or `most`, swizzled."""
    row = shape[-1] * jnp.dtype(dtype).itemsize
    swizzle = next(size for size in (128, 64) if size <= most and row % size == 0)
    transforms = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


@dataclass(frozen=True)
class Refs:
    """What a block reads and writes in global memory, and its scratch by name."""

    q: Any  # [S, K, blocks, packed, D]
    k: Any  # [N, B, K, D]
    v: Any  # the same, of a latent
    table: Any  # [S, P']
    row: Any  # [I]
    first: Any  # [I]
    tiles: Any  # [I]
    cuts: Any  # [workers + 1]
    lengths: Any  # [S]
    contexts: Any  # [S]
    k_scale: Any  # [K] or None
    v_scale: Any
    mixed: Any  # [I * partials, K, blocks, M, R] float32
    weight: Any  # [I * partials, K, blocks, M] float32
    s: dict[str, Any]


def each_item(shape: Shape, refs: Refs, one: Callable[[Any, Any, Any, Any, Any], None]) -> tuple[Any, Any]:
    """one(item, its number in this worker, row, tiles, tiles before it) for each item; how many tiles, items it was."""
    worker, block = lax.axis_index("worker"), lax.axis_index("block")
    begin, end = refs.cuts[worker], refs.cuts[worker + 1]

    def step(item: Any, done: Any) -> Any:
        row = refs.row[item]
        # Query tokens of this block that the row does not have need no keys.
        tiles = jnp.where(block * shape.block < refs.lengths[row], refs.tiles[item], 0)
        one(item, item - begin, row, tiles, done)
        return done + tiles

    return lax.fori_loop(begin, end, step, jnp.int32(0)), end - begin
