"""The static shape of a prefill-attention block, its items, and the producer of keys and values.

8-bit pools arrive in rings of their own. The producer warpgroup widens them, through its registers,
into the rings that the two consumers read, because the tensor core takes 8-bit operands only
transposed, which pages are not. Scales need no product here: those of keys are folded into the
scores, those of values into the results.

Letters: M = 64 rows of a warpgroup, D head dim, B page size; others as in layout.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import Ragged
from pallas_kernels.mosaic.compat import plgpu
from pallas_kernels.mosaic.interpret import Interpret
from pallas_kernels.mosaic.memory import tiled
from pallas_kernels.mosaic.spec import CORES, AttentionShape, check_attention, check_smem
from pallas_kernels.mosaic.widen import widened
from pallas_kernels.ops.paged_attention.plan import PrefillWork, plan_prefill

ROWS = 64  # M, the minimum rows of a warpgroup product
WARPGROUPS = 2  # warpgroups that compute
MOST = 128  # value columns that fit a warpgroup's registers
WIDE = 64  # columns of 2 bytes swizzled together
GRID, ROLE = "block", "role"


@dataclass(frozen=True)
class Config:
    """How one shape is computed; run the work made by `plan` with the same config."""

    heads: int = 1  # query heads of one kv head in a tile, which has 128 / heads tokens
    keys: int = 128  # tokens of keys per tile
    stages: int = 2  # slots of the ring
    above: int = 16  # rows of up to this many tokens are left to decode
    blocks: int = CORES  # persistent blocks; if more than there are items, each computes one
    p_in_smem: bool = (
        True  # pass weights to the second product through shared memory, which avoids a bug of ptxas < 13.3
    )
    ping_pong: bool = True  # the two warpgroups alternate on the tensor core
    # The scores of the next tile are computed during the softmax of this one, which takes `keys` / 2 more registers per
    # thread: with 64 keys nothing spills; with 128 it depends on the shape and the compiler.
    overlap: bool = False
    # The producer copies the next item's queries during this one, and results leave during the next one.
    ahead: bool = False

    @property
    def tile(self) -> int:
        """The tokens of a tile."""
        return WARPGROUPS * ROWS // self.heads

    def plan(self, ragged: Ragged, *, page: int, window: int | None = None) -> PrefillWork:
        """Plan a step; all layers of one window share it."""
        return plan_prefill(ragged, page=page, tile=self.tile, keys=self.keys, above=self.above, window=window)

    def validate(self, spec: AttentionShape) -> None:
        """Raise ValueError, naming the value, if this config cannot compute the spec."""
        if spec.heads % spec.kv_heads:
            raise ValueError(f"{spec.heads=} must be a multiple of {spec.kv_heads=}")
        if self.heads not in (1, 2, 4, 8) or spec.group % self.heads:
            raise ValueError(f"{self.heads=} must be 1, 2, 4 or 8 and divide the {spec.group} query heads of a kv head")
        if spec.dim not in (64, 128, 256):
            raise ValueError(f"{spec.dim=} must be 64, 128 or 256")
        if spec.quantized and spec.dim > MOST:
            raise ValueError(f"{spec.kv_dtype=} with {spec.dim=}: only one tile of keys fits, and that config spills")
        if self.ahead and spec.dim > MOST:
            raise ValueError(f"{self.ahead=} with {spec.dim=}: queries take two copies to the same memory")
        check_attention(spec)
        if self.keys not in (64, 128) or (self.keys % spec.page and spec.page % self.keys):
            raise ValueError(f"{self.keys=} must be 64 or 128, and a multiple or a divisor of {spec.page=}")
        if min(self.stages, self.blocks) < 1 or self.above < 0:
            raise ValueError(f"{self.stages=} and {self.blocks=} must be positive, {self.above=} not negative")
        check_smem(self, self.smem_bytes(spec), spec)

    def smem_bytes(self, spec: AttentionShape) -> int:
        """Return the shared memory of a block: queries, results, the ring, weights, barriers and alignment."""
        wide, rows = int(jnp.dtype(spec.dtype).itemsize), WARPGROUPS * ROWS
        columns = min(spec.dim, MOST)
        ring = self.stages * self.keys * (spec.dim + columns) * (wide + spec.quantized)
        weights = rows * self.keys * wide if self.p_in_smem else 0
        return rows * (spec.dim + columns * (1 + self.ahead)) * wide + ring + weights + 2048


@dataclass(frozen=True)
class PrefillShape:
    """The static parameters of the kernel body."""

    spec: AttentionShape
    config: Config
    tokens: int  # T, at least `span`
    tiles: int  # I, of the plan
    blocks: int
    scale: float
    window: int | None
    softcap: float | None
    interpret: Interpret

    @property
    def span(self) -> int:
        """Tokens of a warpgroup."""
        return ROWS // self.config.heads

    @property
    def head_blocks(self) -> int:
        return self.spec.kv_heads * self.spec.group // self.config.heads

    @property
    def columns(self) -> int:
        """Value columns that an item mixes; more than MOST would not fit the registers."""
        return min(self.spec.dim, MOST)

    @property
    def halves(self) -> int:
        """Items per tile of tokens and block of heads; each computes all scores, for its part of V."""
        return self.spec.dim // self.columns

    @property
    def per_tile(self) -> int:
        """Items per tile of tokens."""
        return self.head_blocks * self.halves

    @property
    def copies(self) -> int:
        """TMA copies per tile of keys."""
        return max(1, self.config.keys // self.spec.page)

    def scratch(self) -> dict[str, Any]:
        """Return the shared memory and barriers of a block, by their names in `Refs`."""
        product, stage = (WARPGROUPS, ROWS, self.spec.dim), (WARPGROUPS, self.columns // WIDE, ROWS, WIDE)
        memory = {
            "q_s": tiled(product, self.spec.compute_dtype),
            "stage": plgpu.SMEM(stage, self.spec.dtype),
            **self._rings("s", self.spec.compute_dtype),
        }
        copied = plgpu.Barrier(num_arrivals=self.copies, num_barriers=self.config.stages)
        full = plgpu.Barrier(num_barriers=self.config.stages) if self.spec.quantized else copied
        free = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=self.config.stages)
        barriers = {
            "q_full": plgpu.Barrier(num_arrivals=self.config.heads * self.columns // WIDE, num_barriers=WARPGROUPS),
            "k_full": full,
            "v_full": full,
            "k_free": free,
            "v_free": free,
            "turn": plgpu.Barrier(num_arrivals=WARPGROUPS),
        }
        if self.config.p_in_smem:
            memory["p_s"] = tiled((WARPGROUPS, ROWS, self.config.keys), self.spec.compute_dtype)
        if self.spec.quantized:
            memory |= self._rings("8", self.spec.kv_dtype)
            barriers |= {"k_in": copied, "v_in": copied}
        if self.config.ahead:
            memory["stored"] = plgpu.SMEM(stage, self.spec.dtype)
            barriers["q_free"] = plgpu.Barrier(num_barriers=WARPGROUPS)
        return memory | barriers

    def _rings(self, name: str, dtype: Any) -> dict[str, Any]:
        """Return the rings of keys and of values."""
        return {
            f"{side}_{name}": tiled((self.config.stages, self.config.keys, width), dtype)
            for side, width in (("k", self.spec.dim), ("v", self.columns))
        }


class Refs(NamedTuple):
    """The kernel's arguments and results, in the order it receives them, and its scratch."""

    q: Any  # [T, H, D]
    k: Any  # [N, B, K, D]
    v: Any  # [N, B, K, D]
    tiles: Any  # [I, 4]; this and the next two are those of PrefillWork
    used: Any  # [1]
    table: Any  # [S, P']
    k_scale: Any  # [K], or None if pools are not quantized
    v_scale: Any
    out: Any  # [T, H, D]
    lse: Any  # [head blocks, I, 2 M] float32, natural log
    q_s: Any  # [2, M, D]
    stage: Any  # [2, columns / 64, M, 64], untiled, so rows can be copied to and from any tokens
    k_s: Any  # [stages, keys, D]
    v_s: Any  # [stages, keys, columns]
    q_full: Any  # barriers
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    turn: Any
    p_s: Any = None  # [2, M, keys], if `p_in_smem`
    k_8: Any = None  # rings like k_s and v_s, of 8 bits, and their barriers
    v_8: Any = None
    k_in: Any = None
    v_in: Any = None
    stored: Any = None  # if `ahead`: results on their way out, like `stage`, which has queries only
    q_free: Any = None  # barriers of `stage`, if `ahead`


class Part(NamedTuple):
    """A warpgroup's part of a tile of tokens; scalars."""

    begin: jax.Array  # first token
    back: jax.Array  # tokens of the copy before `begin`, so that it ends at or before the step's last token
    left: jax.Array  # number of tokens
    offset: jax.Array  # position of the copy's first token


class Item(NamedTuple):
    """One tile of tokens for one block of heads; scalars."""

    tile: jax.Array
    head_block: jax.Array
    half: jax.Array  # which half of the columns of V
    row: jax.Array
    begin: jax.Array
    tokens: jax.Array  # 0 if there is nothing to do
    position: jax.Array
    start: jax.Array  # first tile of keys to read
    tail: jax.Array  # tiles of keys from `start` to the last one seen
    steps: jax.Array  # tiles of keys
    masked: jax.Array  # number of those tiles that need a mask

    def part(self, shape: PrefillShape, role: jax.Array) -> Part:
        """Return the tokens of warpgroup `role`."""
        begin = self.begin + role * shape.span
        back = jnp.maximum(begin + shape.span - shape.tokens, 0)
        left = jnp.clip(self.tokens - role * shape.span, 0, shape.span)
        return Part(begin, back, left, self.position + role * shape.span - back)

    def kv_head(self, shape: PrefillShape) -> jax.Array:
        return lax.div(self.head_block * shape.config.heads, jnp.int32(shape.spec.group))

    def key_tile(self, j: jax.Array) -> jax.Array:
        """Return the j-th tile of keys from `start`: first the masked tail, then around to the window's edge.

        An online softmax does not depend on the order, and this one saves a third loop for windows.
        """
        return jnp.where(j < self.tail, j, j - self.steps)


def find_item(shape: PrefillShape, refs: Refs, index: jax.Array) -> Item:
    """Return the item at `index`; items past the last one have no tokens."""
    tile = jnp.minimum(lax.div(index, jnp.int32(shape.per_tile)), shape.tiles - 1)
    row, begin, tokens, position = (refs.tiles[tile, i] for i in range(4))
    tokens = jnp.where(index < shape.tiles * shape.per_tile, tokens, 0)
    last, keys = position + tokens - 1, jnp.int32(shape.config.keys)
    high = jnp.where(tokens > 0, lax.div(last, keys) + 1, 0)
    low = edge = 0 * tile  # tiles from `low` on are seen, the first `edge` of them not by all tokens
    end = jnp.minimum(lax.div(position + 1, keys), high)  # tiles below `end` are seen up to their last key
    if shape.window is not None:
        low = jnp.minimum(lax.div(jnp.maximum(position - shape.window + 1, 0), keys), high)
        whole = lax.div(jnp.maximum(last - shape.window + 1, 0) + (keys - 1), keys)
        edge = jnp.clip(whole, low, high) - low
        end = jnp.maximum(end, low + edge)
    within = lax.rem(index, jnp.int32(shape.per_tile))
    # Halves are adjacent because they read the same keys.
    head_block, half = (lax.div(within, jnp.int32(shape.halves)), lax.rem(within, jnp.int32(shape.halves)))
    return Item(tile, head_block, half, row, begin, tokens, position, end, high - end, high - low, high - end + edge)


class _Side(NamedTuple):
    """Keys or values: source, destination and barriers."""

    pool: Any
    ring: Any
    full: Any
    free: Any
    narrow: Any  # ring of 8-bit pools, else None
    arrived: Any
    columns: tuple[Any, ...]  # index of the columns to load; () for all


def _sides(shape: PrefillShape, refs: Refs, item: Item) -> tuple[_Side, _Side]:
    part = (pl.ds(item.half * shape.columns, shape.columns),) if shape.halves > 1 else ()
    return (
        _Side(refs.k, refs.k_s, refs.k_full, refs.k_free, refs.k_8, refs.k_in, ()),
        _Side(refs.v, refs.v_s, refs.v_full, refs.v_free, refs.v_8, refs.v_in, part),
    )


def produce(shape: PrefillShape, refs: Refs, item: Item, step: jax.Array) -> jax.Array:
    """Load keys and values of an item; `step` counts key tiles over all items. Return the next item's first step."""
    sides = _sides(shape, refs, item)
    if shape.config.ahead:
        pl.when(item.tokens > 0)(partial(_fetch_ahead, shape, refs, item, step))
    if shape.spec.quantized:
        for j in range(shape.config.stages):  # in flight before the first is widened
            pl.when(j < item.steps)(partial(_fetch_both, shape, refs, item, sides, step, jnp.int32(j)))

    def tile(j: jax.Array, step: jax.Array) -> jax.Array:
        slot = lax.rem(step, jnp.int32(shape.config.stages))
        for side in sides:
            if shape.spec.quantized:
                _widen(shape, refs, item, side, step, j)
                continue

            @pl.when(step >= shape.config.stages)
            def _wait(side: _Side = side) -> None:
                plgpu.barrier_wait(side.free.at[slot])

            _fetch(shape, refs, item, side, j, side.ring.at[slot], side.full.at[slot])
        return step + 1

    after: jax.Array = lax.fori_loop(0, item.steps, tile, step)
    return after


def fetch_queries(shape: PrefillShape, refs: Refs, item: Item, role: Any, begin: int) -> None:
    """Start copying `columns` columns, from `begin`, of a warpgroup's queries to `stage`."""
    part, head = item.part(shape, role), item.head_block * shape.config.heads
    for h, c in product(range(shape.config.heads), range(0, shape.columns, WIDE)):
        plgpu.copy_gmem_to_smem(
            refs.q.at[pl.ds(part.begin - part.back, shape.span), head + h, pl.ds(begin + c, WIDE)],
            refs.stage.at[role, c // WIDE, pl.ds(h * shape.span, shape.span)],
            refs.q_full.at[role],
        )


def _fetch_ahead(shape: PrefillShape, refs: Refs, item: Item, step: jax.Array) -> None:
    """Start copying an item's queries, once both warpgroups have read those of the item before."""

    def fetch(role: jax.Array, carry: jax.Array) -> jax.Array:
        pl.when(step > 0)(lambda: plgpu.barrier_wait(refs.q_free.at[role]))
        fetch_queries(shape, refs, item, role, 0)
        return carry

    lax.fori_loop(0, WARPGROUPS, fetch, jnp.int32(0))


def drain(shape: PrefillShape, refs: Refs, steps: jax.Array) -> None:
    """Wait for the last arrivals of every barrier, which the interpreter requires and a device does not."""
    for role in range(WARPGROUPS if shape.config.ahead else 0):
        pl.when(steps > 0)(partial(plgpu.barrier_wait, refs.q_free.at[role]))
    for slot in range(shape.config.stages):

        @pl.when(steps > slot)
        def _wait(slot: int = slot) -> None:
            plgpu.barrier_wait(refs.k_free.at[slot])
            plgpu.barrier_wait(refs.v_free.at[slot])


def _fetch(shape: PrefillShape, refs: Refs, item: Item, side: _Side, j: jax.Array, into: Any, arrived: Any) -> None:
    """Start copying the j-th tile of keys or values."""
    i, head = item.start + item.key_tile(j), item.kv_head(shape)
    size = min(shape.spec.page, shape.config.keys)
    tokens: Any = slice(None)
    for part in range(shape.copies):
        if shape.spec.page <= shape.config.keys:
            page = refs.table[item.row, i * shape.copies + part]
        else:
            parts = jnp.int32(shape.spec.page // shape.config.keys)
            page, tokens = refs.table[item.row, lax.div(i, parts)], pl.ds(lax.rem(i, parts) * size, size)
        source = side.pool.at[(page, tokens, head, *side.columns)]
        plgpu.copy_gmem_to_smem(source, into.at[pl.ds(part * size, size)], arrived)


def _fetch_both(
    shape: PrefillShape, refs: Refs, item: Item, sides: tuple[_Side, _Side], step: jax.Array, j: jax.Array
) -> None:
    slot = lax.rem(step + j, jnp.int32(shape.config.stages))
    for side in sides:
        _fetch(shape, refs, item, side, j, side.narrow.at[slot], side.arrived.at[slot])


def _widen(shape: PrefillShape, refs: Refs, item: Item, side: _Side, step: jax.Array, j: jax.Array) -> None:
    """Widen the j-th tile into the ring that products read, and reuse its slot for tile j + `stages`."""
    slot = lax.rem(step, jnp.int32(shape.config.stages))
    plgpu.barrier_wait(side.arrived.at[slot])

    @pl.when(step >= shape.config.stages)
    def _wait() -> None:
        plgpu.barrier_wait(side.free.at[slot])

    width = shape.columns if side.columns else shape.spec.dim
    for row, column in product(range(0, shape.config.keys, ROWS), range(0, width, MOST)):
        part = pl.ds(row, ROWS), pl.ds(column, min(width, MOST))
        side.ring[(slot, *part)] = widened(side.narrow.at[(slot, *part)], shape.spec.compute_dtype, shape.interpret)
    plgpu.commit_smem()
    plgpu.barrier_arrive(side.full.at[slot])

    @pl.when(j + shape.config.stages < item.steps)
    def _next() -> None:
        _fetch(shape, refs, item, side, j + shape.config.stages, side.narrow.at[slot], side.arrived.at[slot])
