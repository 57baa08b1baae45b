"""Weights stored as [out, in], and products with them, which are faster on a CPU for few tokens.

XLA's matrix library for CPUs reads the left operand of a product in place but repacks the right one at
every step. Therefore the weight is the left operand here, and the result [out, tokens] is transposed.
For 8 tokens and a weight [1024, 5632] this takes 0.6 of the time, about that of reading the weight once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

FEW = 128  # tokens; with more, repacking a weight takes a small share of the time
BLOCK = 1 << 21  # numbers widened at a time at most: 8 MiB of float32 fit a CPU's caches
LEAST = 4  # blocks at least: without a loop XLA widens on one thread, which takes seven times as long


class Stored:
    """A weight stored in another form."""

    def __getitem__(self, key: Any) -> Self:
        """Return the weight itself for `weight[...]`, as modules write it."""
        if key is not Ellipsis:
            raise TypeError(f"weight[{key!r}]: a {type(self).__name__.lower()} weight supports weight[...] only")
        return self


@partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["split"])
@dataclass(frozen=True)
class Transposed(Stored):
    """A weight [I, ...] stored as values [..., I]: an array, or its description."""

    values: Any
    split: int = 0  # output axis that is sharded, if any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [I, ...] of the weight."""
        *outputs, inputs = self.values.shape
        return inputs, *outputs

    def __rmatmul__(self, x: jax.Array) -> jax.Array:  # x [T, I] @ weight [I, O]
        return product(x, self.values, split=self.split)


def product(x: jax.Array, values: jax.Array, dtype: Any = None, *, split: int = 0) -> jax.Array:
    """Multiply x [T, I] by a weight stored as values [..., I]: [T, ...], in `dtype` or that of x.

    split: the sharded output axis. If it is not the first, it cannot be merged with the axes before it
    without gathering all shards.
    """
    *outputs, inputs = values.shape
    last = values.ndim - 1
    multiplied = partial(lax.dot_general, preferred_element_type=dtype)
    if len(x) > FEW and split:
        return jnp.stack([product(x, part, dtype, split=split - 1) for part in values], axis=1)
    if len(x) > FEW:  # merge the output axes: otherwise XLA copies the weight first
        out = multiplied(x, values.reshape(-1, inputs), (((1,), (1,)), ((), ())))
        return out.reshape(len(x), *outputs)
    # Without the barrier XLA would swap the operands instead of transposing the result.
    out = lax.optimization_barrier(multiplied(values, x, (((last,), (1,)), ((), ()))))
    return jnp.moveaxis(out, -1, 0)


def narrow_product(x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiply x [T, I] by an 8-bit weight stored as values [..., I] with scale [..., 1]: [T, ...] in x's dtype.

    The weight is widened in blocks of outputs. Widening it as a whole would write it to memory and read
    it again, which costs several times what the smaller weight saves.
    """
    *outputs, inputs = values.shape
    rows = prod(outputs)
    blocks = _blocks(rows, inputs)
    parts = values.reshape(blocks, rows // blocks, inputs)
    out = lax.map(lambda part: product(x, part.astype(x.dtype)), parts)  # [blocks, T, rows / blocks]
    whole = jnp.moveaxis(out, 0, 1).reshape(len(x), *outputs)
    return (whole.astype(jnp.float32) * scale.reshape(1, *outputs)).astype(x.dtype)


def _blocks(rows: int, inputs: int) -> int:
    """Return the least number of equal blocks of outputs, at least LEAST, of at most BLOCK numbers each.

    There is at most one block per output.
    """
    least = max(LEAST, -(-rows * inputs // BLOCK))
    return next((count for count in range(least, rows) if rows % count == 0), rows)
