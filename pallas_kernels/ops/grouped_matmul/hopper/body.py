"""The kernel body of the grouped product: one warpgroup copies tiles of rows and weights, the others multiply.

The kernel is persistent: a block runs every `blocks`-th item, which is one tile of rows times
`columns` of their outputs. Tiles along I pass through a ring of `stages` slots by TMA. `Tiles` says
where the tiles of rows are: those of a plan (`Routed`, plan.py), or all rows as one group (`Dense`).

TMA copies have fixed sizes, but tiles have any number of rows. So the rows of a tile are loaded in
pieces, skipping those beyond its last row, and stored as a sum of powers of two. Rows that were not
loaded keep what the slot held before, and reach only results that are not stored.

`Weights` says how weights are loaded and multiplied. `Whole` is for weights of the rows' dtype.
`QuantizedWeights` is for 8 bits (mosaic/quantized_tile.py): there the operands are swapped for any
number of rows, so that each consumer widens its own 64 outputs once for all rows of the item and
never waits for another consumer.

With a gate, a tile's outputs are half gates and half the values that they multiply, and only the
O / 2 results are stored. With swapped operands one consumer has the gates and the other the values,
which it passes through shared memory.

Letters: R rows, X experts, I contracted dimension, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.compat import plgpu
from pallas_kernels.mosaic.interpret import Interpret, cast, fence, is_interpreting
from pallas_kernels.mosaic.memory import tiled
from pallas_kernels.mosaic.quantized_tile import CONSUMERS, ROWS, Ring, Tile, bring, summed

GRID, ROLE = "block", "role"
DEPTH = 64  # inputs in 128 bytes, the span of the swizzle
WIDE = 64  # columns of results stored together
ALIGN = 8  # rows that a shared-memory tiling keeps together; groups are aligned to it
LEAST = 16  # rows that are always loaded


Gate = Callable[[jax.Array, jax.Array], jax.Array]  # the gates and the values, float32 -> what is stored
Products = tuple[jax.Array, ...]  # one; or with a gate and operands not swapped, the gates and the values


@dataclass(frozen=True)
class GroupedShape:
    """The static parameters of the kernel body."""

    rows: int  # of a tile
    columns: int  # of a tile
    stages: int
    consumers: int  # warpgroups that multiply
    swapped: bool  # outputs are the rows of the tensor core's product, tokens its columns
    blocks: int
    strips: int  # O / columns
    outputs: int  # O
    depth: int  # inputs of a tile
    steps: int  # I / depth
    dtype: Any  # of the products
    out_dtype: Any
    tiles: Tiles
    weights: Weights
    interpret: Interpret
    gate: Gate | None = None

    @property
    def parts(self) -> int:
        """The number of places in O that the columns of a tile come from."""
        return 1 if self.gate is None else 2

    @property
    def apart(self) -> int:
        """The columns of O between two parts of a tile."""
        return self.outputs // self.parts

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The (first row, rows) of each copy of a tile of rows."""
        if not self.swapped:
            each = self.rows // self.consumers
            return [(i * each, each) for i in range(self.consumers)]
        pieces, done = [(0, min(LEAST, self.rows))], min(LEAST, self.rows)
        while done < self.rows:
            pieces.append((done, done))
            done *= 2
        return pieces

    @property
    def product(self) -> tuple[int, int]:
        """The shape that one consumer computes."""
        if self.swapped:
            return self.columns // self.consumers, self.rows
        return self.rows // self.consumers, self.columns

    @property
    def stored(self) -> int:
        """The rows of a tile that one consumer has results of."""
        return self.rows if self.swapped else self.rows // self.consumers

    def scratch(self) -> list[Any]:
        ring, out = self.stages, (self.consumers, self.stored, WIDE)
        return [
            tiled((ring, self.rows, self.depth), self.dtype),
            tiled(out, self.out_dtype),
            plgpu.Barrier(num_arrivals=self.weights.copies + len(self.pieces), num_barriers=ring),
            plgpu.Barrier(num_arrivals=self.consumers, num_barriers=ring),
            *self.passed(),
            *self.weights.scratch(self),
        ]

    def passed(self) -> list[Any]:
        """Return the scratch of the values that a consumer passes, and the barriers that they are there and read."""
        if self.gate is None or not self.swapped:
            return []
        return [plgpu.SMEM(self.product, jnp.float32), *[plgpu.Barrier(num_arrivals=1, num_barriers=1)] * 2]


class Refs(NamedTuple):
    """The kernel's arguments, results and scratch, in the order it receives them."""

    x: Any  # [R, I]
    tiles: tuple[Any, ...]
    weights: tuple[Any, ...]
    out: Any  # [R, O]
    x_s: Any  # [stages, rows, depth]
    out_s: Any  # [consumers, stored, WIDE]
    full: Any  # barriers
    free: Any
    passed: tuple[Any, ...]  # see `GroupedShape.scratch`
    weights_s: tuple[Any, ...]

    @classmethod
    def of(cls, arrays: tuple[Any, ...], shape: GroupedShape) -> Refs:
        """Split the kernel's arrays."""
        x, *rest = arrays
        first, last = shape.tiles.arrays, shape.tiles.arrays + shape.weights.arrays
        out, x_s, out_s, full, free, *more = rest[last:]
        tiles, held, count = tuple(rest[:first]), tuple(rest[first:last]), len(shape.passed())
        return cls(x, tiles, held, out, x_s, out_s, full, free, tuple(more[:count]), tuple(more[count:]))


class Item(NamedTuple):
    """Scalars of one item: a tile of rows and a strip of outputs."""

    expert: jax.Array
    begin: jax.Array  # first row
    length: jax.Array  # rows
    column: jax.Array  # first result


def body(shape: GroupedShape) -> Callable[..., None]:
    """Return the kernel over the grid GRID and the threads ROLE: consumers first, then the producer."""

    def run(*arrays: Any) -> None:
        refs = Refs.of(arrays, shape)
        role, block = lax.axis_index(ROLE), lax.axis_index(GRID)

        def each(compute: Callable[[Item, jax.Array], None]) -> jax.Array:
            """Call one(item, ring steps before it) for each item of this block; return the number of steps."""
            items = shape.tiles.items(shape, refs)
            turns = lax.div(jnp.maximum(items - block, 0) + (shape.blocks - 1), jnp.int32(shape.blocks))

            def turn(i: jax.Array, done: jax.Array) -> jax.Array:
                compute(shape.tiles.item(shape, refs, i * shape.blocks + block), done)
                return done + shape.steps

            steps: jax.Array = lax.fori_loop(0, turns, turn, jnp.int32(0))
            return steps

        @pl.when(role < shape.consumers)
        def _() -> None:
            if not is_interpreting(shape.interpret):
                plgpu.set_max_registers(232 if shape.consumers == 2 else 248, action="increase")
            each(partial(_consume, shape, refs, role))

        @pl.when(role == shape.consumers)
        def _() -> None:
            if not is_interpreting(shape.interpret):
                plgpu.set_max_registers(40, action="decrease")
            steps = each(partial(_produce, shape, refs))
            for slot in range(shape.stages):  # a block must not end before every arrival was waited for
                pl.when(steps > slot)(partial(plgpu.barrier_wait, refs.free.at[slot]))

    return run


@dataclass(frozen=True)
class Routed:
    """The tiles of a plan, given as expert, begin and length [I] and used [1]; see `Groups`."""

    arrays = 4  # arguments of the kernel

    def items(self, shape: GroupedShape, refs: Refs) -> jax.Array:
        """Return the number of items."""
        used: jax.Array = refs.tiles[3][0]
        return used * shape.strips

    def item(self, shape: GroupedShape, refs: Refs, index: jax.Array) -> Item:
        """Return an item; blocks run items of neighboring indices at the same time."""
        expert, begin, length, _ = refs.tiles
        tile, strip = lax.div(index, jnp.int32(shape.strips)), lax.rem(index, jnp.int32(shape.strips))
        # Divided and multiplied so that the compiler can prove the alignment, which copies to tiled memory require.
        first = lax.div(begin[tile], jnp.int32(ALIGN)) * ALIGN
        return Item(expert[tile], first, length[tile], strip * (shape.columns // shape.parts))


@dataclass(frozen=True)
class Dense:
    """All rows as one group: nothing is planned or read. Tiles of a strip are neighbors, so they share its weights."""

    rows: int  # that count; further ones are padding

    arrays = 0

    def count(self, tile: int) -> int:
        return -(-self.rows // tile)

    def items(self, shape: GroupedShape, refs: Refs) -> jax.Array:
        count: jax.Array = jnp.int32(self.count(shape.rows) * shape.strips)
        return count

    def item(self, shape: GroupedShape, refs: Refs, index: jax.Array) -> Item:
        tiles = jnp.int32(self.count(shape.rows))
        strip, first = lax.div(index, tiles), lax.rem(index, tiles) * shape.rows
        length = jnp.minimum(self.rows - first, shape.rows)
        return Item(jnp.int32(0), first, length, strip * (shape.columns // shape.parts))


Tiles = Routed | Dense  # where the tiles of rows are, and with whose weights they are multiplied


def _produce(shape: GroupedShape, refs: Refs, item: Item, done: jax.Array) -> None:
    def step(k: jax.Array, nothing: None) -> None:
        slot = lax.rem(done + k, jnp.int32(shape.stages))
        full = refs.full.at[slot]

        @pl.when(done + k >= shape.stages)
        def _() -> None:
            plgpu.barrier_wait(refs.free.at[slot])

        shape.weights.bring(shape, refs, item, k, slot)
        for first, rows in shape.pieces:

            def bring(first: int = first, rows: int = rows) -> None:
                source = refs.x.at[pl.ds(item.begin + first, rows), pl.ds(k * shape.depth, shape.depth)]
                plgpu.copy_gmem_to_smem(source, refs.x_s.at[slot, pl.ds(first, rows)], full)

            if first:
                pl.when(item.length > first)(bring)
                pl.when(item.length <= first)(partial(plgpu.barrier_arrive, full))
            else:
                bring()

    lax.fori_loop(0, shape.steps, step, None)


def _consume(shape: GroupedShape, refs: Refs, role: jax.Array, item: Item, done: jax.Array) -> None:
    count = item.length if shape.swapped else jnp.clip(item.length - role * shape.stored, 0, shape.stored)

    @pl.when(count > 0)
    def _multiply() -> None:
        products = shape.weights.multiply(shape, refs, role, item, done)
        if shape.gate is None:
            _store(shape, refs, role, item, count, products[0])
        elif shape.swapped:
            _gate_across(shape, refs, role, products[0], partial(_store, shape, refs, role * 0, item, count))
        else:
            _store(shape, refs, role, item, count, shape.gate(*products))

    @pl.when(count <= 0)  # without rows, the consumer only has to keep the ring going
    def _pass() -> None:
        def step(k: jax.Array, _: None) -> None:
            slot = lax.rem(done + k, jnp.int32(shape.stages))
            plgpu.barrier_wait(refs.full.at[slot])
            plgpu.barrier_arrive(refs.free.at[slot])

        lax.fori_loop(0, shape.steps, step, None)


def _gate_across(
    shape: GroupedShape, refs: Refs, role: jax.Array, product: jax.Array, store: Callable[[jax.Array], None]
) -> None:
    """Store the gated values, if this consumer has the gates; else pass the values to the one that does."""
    assert shape.gate is not None
    gate, (values_s, there, read) = shape.gate, refs.passed

    @pl.when(role == 0)
    def _gated() -> None:
        plgpu.barrier_wait(there)
        values = compat.load(values_s, plgpu.Layout.WGMMA)
        plgpu.barrier_arrive(read)
        store(gate(product, values))

    @pl.when(role == 1)
    def _passed() -> None:
        values_s[...] = product
        plgpu.barrier_arrive(there)
        plgpu.barrier_wait(read)


@dataclass(frozen=True)
class Whole:
    """16-bit weights, which the tensor core reads as loaded."""

    parts: int = 1

    arrays = 1  # arguments of the kernel

    @property
    def copies(self) -> int:
        """The number of copies that load a tile."""
        return self.parts

    def scratch(self, shape: GroupedShape) -> list[Any]:
        return [tiled((shape.stages, self.parts, shape.depth, shape.columns // self.parts), shape.dtype)]

    def bring(self, shape: GroupedShape, refs: Refs, item: Item, k: jax.Array, slot: jax.Array) -> None:
        """Start copying tile k of an item into a slot."""
        (weight,), (w_s,) = refs.weights, refs.weights_s
        width = shape.columns // self.parts
        for i in range(self.parts):
            columns = pl.ds(item.column + i * shape.apart, width)
            source = weight.at[item.expert, pl.ds(k * shape.depth, shape.depth), columns]
            plgpu.copy_gmem_to_smem(source, w_s.at[slot, i], refs.full.at[slot])

    def multiply(self, shape: GroupedShape, refs: Refs, role: jax.Array, item: Item, done: jax.Array) -> Products:
        """Return a consumer's part of the item, float32, from ring step `done` on."""
        height, width = shape.product
        several = 1 if shape.swapped else self.parts  # with swapped operands a consumer has one of the parts
        sums = [plgpu.ACC((height, width // several), jnp.float32)] * several
        products: Products = pl.run_scoped(partial(_sum, shape, refs, role, done), *sums)
        return products


def _sum(shape: GroupedShape, refs: Refs, role: jax.Array, done: jax.Array, *sums: Any) -> Products:
    (height, _), (w_s,) = shape.product, refs.weights_s

    def release(k: jax.Array) -> None:
        fence(shape.interpret)
        plgpu.barrier_arrive(refs.free.at[lax.rem(done + k, jnp.int32(shape.stages))])

    def step(k: jax.Array, _: None) -> None:
        slot = lax.rem(done + k, jnp.int32(shape.stages))
        plgpu.barrier_wait(refs.full.at[slot])
        if shape.swapped:
            weight = w_s.at[slot, role] if shape.parts > 1 else w_s.at[slot, 0, :, pl.ds(role * height, height)]
            plgpu.wgmma(sums[0], compat.transpose(weight), compat.transpose(refs.x_s.at[slot]))
        else:
            for part, acc in enumerate(sums):
                plgpu.wgmma(acc, refs.x_s.at[slot, pl.ds(role * height, height)], w_s.at[slot, part])
        plgpu.wgmma_wait(len(sums))  # the previous products have read their slot
        pl.when(k > 0)(partial(release, k - 1))

    lax.fori_loop(0, shape.steps, step, None)
    products = tuple(acc[...] for acc in sums)  # waits for the last products
    release(jnp.int32(shape.steps - 1))
    return products


def _store(shape: GroupedShape, refs: Refs, role: jax.Array, item: Item, count: jax.Array, product: jax.Array) -> None:
    """Store the results of `count` rows through shared memory, rounded up to ALIGN; the extra rows are padding."""
    height, width = product.shape
    product = product.astype(shape.out_dtype)
    if shape.swapped:
        product = cast(product, plgpu.Layout.WGMMA_TRANSPOSED, shape.interpret)
    out_s = refs.out_s.at[role]
    rows = lax.div(count + (ALIGN - 1), jnp.int32(ALIGN)) * ALIGN
    first = item.begin if shape.swapped else item.begin + role * shape.stored
    column = item.column + (role * height if shape.swapped else 0)
    for c in range(0, height if shape.swapped else width, WIDE):
        if shape.swapped:
            compat.transpose(out_s)[...] = product[c : c + WIDE]
        else:
            out_s[...] = product[:, c : c + WIDE]
        plgpu.commit_smem()
        done, size = rows * 0, shape.stored
        while size >= ALIGN:

            @pl.when((rows & size) != 0)
            def _copy(size: int = size, done: jax.Array = done, c: int = c) -> None:
                at = lax.div(done, jnp.int32(ALIGN)) * ALIGN
                target = refs.out.at[pl.ds(first + at, size), pl.ds(column + c, WIDE)]
                plgpu.copy_smem_to_gmem(out_s.at[pl.ds(at, size)], target)

            done, size = done + (rows & size), size // 2
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@dataclass(frozen=True)
class QuantizedWeights:
    """8-bit values [X, I, O] with scales [X, n, O] float32."""

    tile: Tile

    arrays = 2
    copies = CONSUMERS

    def scratch(self, shape: GroupedShape) -> list[Any]:
        return self.tile.scratch(shape.stages)

    def bring(self, shape: GroupedShape, refs: Refs, item: Item, k: jax.Array, slot: jax.Array) -> None:
        (values, _), (narrow_s, _) = refs.weights, refs.weights_s
        where = item.expert, pl.ds(k * shape.depth, shape.depth)
        bring(values, where, item.column, narrow_s.at[slot], refs.full.at[slot], self._apart(shape))

    def multiply(self, shape: GroupedShape, refs: Refs, role: jax.Array, item: Item, done: jax.Array) -> Products:
        (_, scale), (narrow_s, wide_s) = refs.weights, refs.weights_s
        outputs = pl.ds(item.column + role * self._apart(shape), ROWS)

        def scale_at(k: jax.Array) -> Any:
            return scale.at[item.expert, lax.div(k, jnp.int32(self.tile.every)), outputs]

        ring = Ring(narrow_s, wide_s, refs.x_s, refs.full, refs.free, shape.stages, role, done)
        total = summed(self.tile, ring, shape.steps, scale_at)
        if self.tile.every:
            return (total,)
        by_output = compat.load(scale.at[item.expert, 0, outputs], plgpu.Layout.WGMMA.reduce(1), optimized=False)
        return (total * lax.broadcast_in_dim(by_output, total.shape, (0,)),)

    def _apart(self, shape: GroupedShape) -> int:
        """Return the columns between the outputs of the two consumers."""
        return ROWS if shape.gate is None else shape.apart


Weights = Whole | QuantizedWeights
