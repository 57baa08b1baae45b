"""The static shape of a decode-attention block, its items, its producer, and what its consumers share.

Letters: M rows of the product (query tokens times G, padded), C tokens of keys in a tile, D head
dim, R columns of the values (D, except for a latent), B page size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import compat, fragments
from pallas_kernels.mosaic.compat import plgpu
from pallas_kernels.mosaic.interpret import Interpret, cast, fence
from pallas_kernels.mosaic.memory import tiled
from pallas_kernels.mosaic.spec import AttentionShape
from pallas_kernels.ops.paged_attention.hopper.softmax import HIDDEN, capped

MEETING = 64  # columns that warps with their own keys sum at a time
WIDE = 64  # columns of queries and results that are copied together
MOST = 128  # columns of mixed values that leave a consumer registers for `WIDE` more


def spills(dim: int) -> bool:
    """Return whether warpgroup products leave too few registers to exchange tokens with the layers' layout."""
    return dim > MOST or compat.VERSION < (0, 11)


class Split(Enum):
    """How the consumers of a block share out the keys; see decode_body.py."""

    TILES = "each consumer takes tiles of its own"
    WARPS = "each warp of a consumer takes keys of its own"
    SHARED = "two consumers compute every tile together"


class Results(Enum):
    """How queries enter a block and results leave it."""

    PACKED = "XLA packs queries by row, and another kernel combines all results"
    BY_TOKEN = "in the layers' layout; another kernel combines the partial results of split rows"
    MERGED = "in the layers' layout; the last worker of a split row merges its partial results"


@dataclass(frozen=True)
class DecodeShape:
    """The static parameters of a block, and what follows from them."""

    spec: AttentionShape
    config: Any  # of decode or of MLA
    scale: float
    window: int | None
    softcap: float | None
    interpret: Interpret
    causal: bool = True  # a query sees keys up to its own position; else all keys of its row

    @cached_property
    def rows(self) -> int:
        """M, the rows of a product."""
        return int(self.config.rows(self.spec))

    @cached_property
    def group(self) -> int:
        """G, the query heads of a block."""
        return int(self.config.group(self.spec))

    @cached_property
    def block(self) -> int:
        """Query tokens of a block."""
        return int(self.config.block(self.spec))

    @property
    def latent(self) -> int:
        """R, if the values are the first columns of the keys; 0: values have their own pool."""
        return self.spec.values

    @property
    def values(self) -> int:
        """R, the columns of the values."""
        return self.latent or self.spec.dim

    @property
    def split(self) -> Split:
        if self.config.warps:
            return Split.WARPS if self.spec.quantized else Split.TILES
        return Split.SHARED if self.latent else Split.TILES

    @property
    def results(self) -> Results:
        wide = self.spec.dim > MOST or self.softcap is not None if self.split is Split.WARPS else spills(self.spec.dim)
        if self.latent or (wide and (self.split is Split.WARPS or not self.config.warps)):
            return Results.PACKED
        # Products of more than 16 rows leave too few registers to count the workers.
        return Results.MERGED if self.config.merge and self.rows <= fragments.ROWS else Results.BY_TOKEN

    @property
    def whole(self) -> bool:
        """Whether each consumer takes every tile, and mixes columns of its own: those of a latent are too many."""
        return bool(self.latent) and self.split is not Split.TILES

    @property
    def mixed(self) -> int:
        """Value columns that a consumer mixes."""
        return self.latent // self.config.consumers if self.whole else self.values

    @property
    def width(self) -> int:
        """Value columns of one product of a consumer."""
        if not self.latent or self.split is Split.SHARED:
            return self.mixed
        return 64 if self.mixed % 128 else 128

    @property
    def slots(self) -> int:
        """Ring slots per tile."""
        return int(self.config.consumers) if self.split is Split.SHARED else 1

    def place(self, tile: Any, part: Any = 0) -> Any:
        """Return the slot of a part of the block's `tile`th tile.

        Parts alternate between slots from tile to tile. If the slot were static, the compiler would
        compute every address of the products before the loop over tiles and hold them in registers,
        which are scarce.
        """
        slot = lax.rem(tile, self.config.stages // self.slots)
        return slot if self.slots == 1 else slot * self.slots + lax.rem(tile + part, self.slots)

    @property
    def slot(self) -> int:
        """Tokens of keys per slot."""
        return int(self.config.tile) // self.slots

    @property
    def used(self) -> int:
        """Rows of the product in use; the others are computed from old data, and not stored."""
        return self.block * self.group

    @property
    def packed(self) -> int:
        """Rows of packed queries, a multiple of the 8 rows of a tile in shared memory; all of fragments."""
        return self.rows if self.latent and self.split is Split.WARPS else -(-self.used // 8) * 8

    @property
    def kept(self) -> int:
        """Rows of a partial result that is merged: those in use, in fours, so that each warp has its own."""
        return -(-self.used // 4) * 4

    @property
    def partials(self) -> int:
        """Partial results per item."""
        return int(self.config.consumers) if self.results is Results.PACKED and not self.whole else 1

    @property
    def queues(self) -> int:
        """Items whose packed queries are in shared memory at a time."""
        return 1 if self.split is Split.SHARED else 2

    @property
    def pages(self) -> int:
        """Pages per tile; 1 if a tile is part of a page."""
        return max(1, int(self.config.tile) // self.spec.page)

    @property
    def copies(self) -> int:
        """Pages per slot, and thus copies and arrivals at its barrier; 1 if a slot is part of a page."""
        return max(1, self.slot // self.spec.page)

    def layout(self, operand: str, dtype: Any = None) -> Any:
        """Return the register layout of a product's operand: "LHS", "RHS" or "ACC"."""
        if not self.config.warps or self.split is Split.WARPS:
            return plgpu.Layout.WGMMA
        return getattr(plgpu.Layout, f"MMA_{operand}")(
            dtype or self.spec.compute_dtype, m_warps=min(4, self.rows // 16)
        )

    def scratch(self) -> dict[str, Any]:
        """Return the shared memory and barriers of a block."""
        ring = (self.config.stages, self.slot, self.spec.dim)
        sides = ("k",) if self.latent else ("k", "v")
        memory, barriers = self._packed_queries() if self.results is Results.PACKED else self._tokens()
        for side in sides:
            most = fragments.KEY_SWIZZLE if self.split is Split.WARPS and side == "k" else 128
            memory[side] = tiled(ring, self.spec.kv_dtype, most)
            barriers[f"{side}_full"] = plgpu.Barrier(num_arrivals=self.copies, num_barriers=self.config.stages)
            barriers[f"{side}_free"] = plgpu.Barrier(
                num_arrivals=self.config.consumers if self.whole else 1, num_barriers=self.config.stages
            )
        if self.split is Split.WARPS:
            memory["among"] = plgpu.SMEM((self.config.consumers, 128), jnp.float32)
            memory["summed"] = plgpu.SMEM(
                (self.config.consumers, 64, MEETING + 8), jnp.float32
            )  # padded: no bank conflicts
        elif self.whole:
            memory["traded"] = plgpu.SMEM((self.config.consumers, self.rows), jnp.float32)
            barriers["met"] = plgpu.Barrier(num_arrivals=self.config.consumers, num_barriers=2)
        elif self.config.warps or self.config.p_in_smem:
            memory["p"] = tiled((self.config.consumers, self.rows, self.config.tile), self.spec.compute_dtype)
        if self.spec.quantized and self.split is not Split.WARPS:
            memory["wide"] = tiled((self.config.consumers, self.config.tile, self.spec.dim), self.spec.compute_dtype)
        return memory | barriers

    def _packed_queries(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the memory and barriers of queries that the producer copies."""
        return {"q": tiled((self.queues, self.rows, self.spec.dim), self.spec.compute_dtype)}, {
            "q_full": plgpu.Barrier(num_arrivals=1, num_barriers=self.queues),
            "q_free": plgpu.Barrier(num_arrivals=self.config.consumers, num_barriers=self.queues),
        }

    def _tokens(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the memory and barriers of queries and results that consumers copy (decode_tokens.py)."""
        chunks, lanes = self.spec.dim // WIDE, 64 if self.split is Split.WARPS else self.rows
        memory = {"stage": plgpu.SMEM((chunks, self.rows, WIDE), self.spec.dtype)}
        memory["added"] = plgpu.SMEM((chunks if self.config.consumers > 1 else 1, self.rows, WIDE), jnp.float32)
        memory["traded"] = plgpu.SMEM((self.config.consumers, 2, lanes), jnp.float32)
        if not self.config.warps:
            memory["q"] = tiled((1, self.rows, self.spec.dim), self.spec.compute_dtype)
        return memory, {
            "q_full": plgpu.Barrier(num_arrivals=self.block * chunks, num_barriers=1),
            "met": plgpu.Barrier(num_arrivals=self.config.consumers, num_barriers=2),
        }


class Refs(NamedTuple):
    """What a block reads and writes in global memory, and its scratch by name."""

    q: Any  # [T, K, G, D], or if `apart` [S, K, blocks, packed, D]
    k: Any  # [N, B, K, D]
    v: Any  # likewise; for a latent, the same ref as k
    table: Any  # [S, P']; this and the next six are those of DecodeWork
    row: Any  # [I]
    first: Any  # [I]
    tiles: Any  # [I]
    cuts: Any  # [workers + 1]
    part: Any  # [I]
    starts: Any  # [S]
    lengths: Any  # [S]
    contexts: Any  # [S]
    worker: Any  # [S]; this and the next two are those of DecodeWork, or None if not `merged`
    splits: Any  # [S]
    tokens: Any  # [1]
    left: Any  # [S, K, blocks, consumers] int32, the items of a row that are not stored yet, less one
    k_scale: Any  # [K] or None
    v_scale: Any
    mixed: (
        Any  # float32 [parts, tokens of a row, K, G, D], if `apart` [I * partials, K, blocks, M, R], if `merged` as in
    )
    # decode_merge.py
    weight: Any  # [parts or I * partials, K, blocks, M] float32, log2 of the sum of weights
    out: Any  # [T, K, G, D], or None if `apart`
    lse: Any  # [S, K, blocks, M] float32, natural log, or None if `apart`
    s: dict[str, Any]


def each_item(shape: DecodeShape, refs: Refs, compute: Callable[[Any, Any, Any, Any, Any], None]) -> tuple[Any, Any]:
    """Call one(item, its number in this worker, row, tiles, tiles before it) for each item of this worker.

    Returns the worker's number of tiles and of items.
    """
    worker, block = lax.axis_index("worker"), lax.axis_index("block")
    begin, end = refs.cuts[worker], refs.cuts[worker + 1]

    def step(item: Any, done: Any) -> Any:
        row = refs.row[item]
        # If the row has no query tokens in this block, no keys are read.
        tiles = jnp.where(block * shape.block < refs.lengths[row], refs.tiles[item], 0)
        compute(item, item - begin, row, tiles, done)
        return done + tiles

    return lax.fori_loop(begin, end, step, jnp.int32(0)), end - begin


def release(shape: DecodeShape, free: Any) -> None:
    """Let the producer overwrite a slot that this consumer has read."""
    if shape.config.warps:
        plgpu.commit_smem()  # ordinary loads have read the slot, and TMA writes it next
    else:
        fence(shape.interpret)
    plgpu.barrier_arrive(free)


def mine(shape: DecodeShape, me: Any, tiles: Any, done: Any) -> tuple[Any, Any]:
    """Return a consumer's first tile in an item and its number of tiles; `done` counts tiles over all items."""
    first = lax.rem(me + shape.config.consumers - lax.rem(done, shape.config.consumers), shape.config.consumers)
    first = jnp.int32(first if shape.config.consumers > 1 else 0)
    return first, lax.div(tiles - first + (shape.config.consumers - 1), shape.config.consumers)


def scale_of(scales: Any, head: Any) -> Any:
    """Return the scale of a head's keys or values; 1 without scales."""
    return 1.0 if scales is None else scales[head]


def soften(score: jax.Array, peak: jax.Array, unit: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the weights of scores, the factor that fades earlier ones, and the new peak in log2 units."""
    top = jnp.maximum(peak, jnp.max(score, axis=1) * unit)
    weight = jnp.exp2(score * unit - lax.broadcast_in_dim(top, score.shape, (0,)))
    return weight, jnp.exp2(peak - top), top


def last_key(shape: DecodeShape, refs: Refs, row: Any) -> Any:
    """Return the last key that the block's first query token sees; if causal, its token t sees up to t keys more."""
    if not shape.causal:
        return refs.contexts[row] - 1
    return refs.contexts[row] - refs.lengths[row] + lax.axis_index("block") * shape.block


def mask(shape: DecodeShape, score: jax.Array, key: Any, position: Any, raw: Any) -> jax.Array:
    """Apply the soft cap, then mask keys that row r, of query token r // G, may not see; position: `last_key`."""
    if shape.softcap:
        score = capped(score, raw, shape.softcap)

    layout = shape.layout("ACC", jnp.float32 if shape.config.warps else None)

    def iota(axis: int) -> jax.Array:
        return cast(lax.broadcasted_iota(jnp.int32, score.shape, axis), layout, shape.interpret)

    several = shape.block > 1 and shape.causal  # otherwise all query tokens see the same keys
    if shape.split is Split.WARPS:
        # Row 16 w + r and column 16 c + n are query row r and key 64 c + 16 w + n (fragments.py).
        row, column = iota(0), iota(1)
        token = lax.div(row & 15, jnp.int32(shape.group)) if several else 0
        return _seen(shape, score, (column & 15) + ((column & ~15) << 2) + (row & 48) + (key - position), token)
    token = lax.div(iota(0), jnp.int32(shape.group)) if several else 0
    if shape.spec.dim > 128:
        # A thread's columns are 8 i + 0, 1 plus its offset. Split so, the compiler turns 8 i into constants. Whole
        # column numbers would take a register each, and spill beside the others. Narrower heads are faster with them.
        column = iota(1)
        ahead, last = column & ~7, (position - key) + token - (column & 7)
    else:
        ahead, last = iota(1) + (key - position), token  # relative to the block's first token
    return _seen(shape, score, ahead, last)


def _seen(shape: DecodeShape, score: jax.Array, ahead: jax.Array, last: Any) -> jax.Array:
    seen = ahead <= last
    if shape.window is not None:
        seen &= ahead > last - shape.window
    return jnp.where(seen, score, HIDDEN)


def produce(shape: DecodeShape, refs: Refs) -> None:
    """Copy the keys and values of all items of this worker into the rings, and packed queries."""
    s = refs.s

    def copy_item(item: Any, number: Any, row: Any, tiles: Any, done: Any) -> None:
        first = refs.first[item]
        if shape.results is Results.PACKED:
            _copy_queries(shape, refs, number, row)

        def step(i: Any, pages: list[Any]) -> list[Any]:
            ahead = _ids(shape, refs, row, first, tiles, i + 1)  # loads in flight while this tile waits for its slot
            offset = lax.rem(first + i, max(1, shape.spec.page // shape.config.tile)) * shape.config.tile
            for part in range(shape.slots):
                _copy(shape, refs, done + i, part, pages, offset)
            return ahead

        lax.fori_loop(0, tiles, step, _ids(shape, refs, row, first, tiles, 0))

    total, items = each_item(shape, refs, copy_item)
    # A block must not end before every arrival was waited for: here, each barrier's last round.
    if shape.results is Results.PACKED:
        _wait_last(shape, s["q_free"], items, shape.queues)
    for name in ("k_free",) if shape.latent else ("k_free", "v_free"):
        _wait_last(shape, s[name], total * shape.slots, shape.config.stages)


def _wait_last(shape: DecodeShape, barriers: Any, uses: Any, places: int) -> None:
    """Wait for the barriers of `places` that were used at all.

    If consumers widen 8-bit pools, in a loop: the compiler would keep the addresses of static places from the start
    of the kernel in memory (180 bytes). If two consumers share tiles, a loop spills 650 bytes.
    """
    if shape.spec.quantized and shape.split is not Split.WARPS:

        def step(place: Any, carry: Any) -> Any:
            plgpu.barrier_wait(barriers.at[place])
            return carry

        lax.fori_loop(0, jnp.minimum(uses, places), step, jnp.int32(0))
        return
    for place in range(places):
        pl.when(uses > place)(partial(plgpu.barrier_wait, barriers.at[place]))


def _copy_queries(shape: DecodeShape, refs: Refs, number: Any, row: Any) -> None:
    s, place = refs.s, lax.rem(number, shape.queues)

    @pl.when(number >= shape.queues)
    def _() -> None:
        plgpu.barrier_wait(s["q_free"].at[place])

    target = s["q"].at[place] if shape.packed == shape.rows else s["q"].at[place, pl.ds(0, shape.packed)]
    source = refs.q.at[row, lax.axis_index("head"), lax.axis_index("block")]
    plgpu.copy_gmem_to_smem(source, target, s["q_full"].at[place])


def _ids(shape: DecodeShape, refs: Refs, row: Any, first: Any, tiles: Any, tile: Any) -> list[Any]:
    """Return the page ids of a tile, clamped to the item's tiles."""
    at = first + jnp.maximum(jnp.minimum(tile, tiles - 1), 0)
    if shape.spec.page >= shape.config.tile:
        return [refs.table[row, lax.div(at, shape.spec.page // shape.config.tile)]]
    return [refs.table[row, at * shape.pages + j] for j in range(shape.pages)]


def _copy(shape: DecodeShape, refs: Refs, tile: Any, part: int, pages: list[Any], offset: Any) -> None:
    """Copy the keys and values of one slot: that `part` of the block's `tile`th tile.

    The tile consists of `pages`, and starts at `offset` of a page.
    """
    s, slot, head = refs.s, shape.place(tile, part), 0 if shape.latent else lax.axis_index("head")
    rows = min(shape.slot, shape.spec.page)
    for name, pool in (("k", refs.k),) if shape.latent else (("k", refs.k), ("v", refs.v)):

        @pl.when(tile * shape.slots >= shape.config.stages)
        def _(name: str = name) -> None:
            plgpu.barrier_wait(s[f"{name}_free"].at[slot])

        for j in range(shape.copies):
            page, begin = divmod(part * shape.slot + j * rows, min(shape.spec.page, shape.config.tile))
            whole = shape.spec.page <= shape.slot
            source = pool.at[pages[page], :, head] if whole else pool.at[pages[page], pl.ds(offset + begin, rows), head]
            plgpu.copy_gmem_to_smem(source, s[name].at[slot, pl.ds(j * rows, rows)], s[f"{name}_full"].at[slot])
