"""Weights that lie as [out, in], and products with them: what a CPU multiplies few tokens by fastest.

XLA's library for a CPU reads the left operand of a product in place and packs the right one first, at every step. So
here the weight is on the left, and the result [out, tokens] is turned round: of 8 tokens and a weight [1024, 5632] that
takes 0.6 of the time, which is that of reading the weight once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

FEW = 128  # tokens; of more, packing a weight is a small part
BLOCK = 1 << 21  # numbers that are widened at a time at most: 8 MiB of float32 stay in a CPU's caches
LEAST = 4  # blocks: without a loop XLA widens on one thread, which takes seven times as long


@partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["split"])
@dataclass(frozen=True)
class Transposed:
    """A weight [I, ...] as values [..., I]: an array, or its description."""

    values: Any
    split: int = 0  # output axis that devices share, where they do

    def __getitem__(self, key: Any) -> Transposed:
        """The whole: modules say `weight[...]`."""
        if key is not Ellipsis:
            raise TypeError(f"weight[{key!r}]: a transposed weight can be had as a whole only, as weight[...]")
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight."""
        *outputs, inputs = self.values.shape
        return inputs, *outputs

    def __rmatmul__(self, x: jax.Array) -> jax.Array:  # x [T, I] @ weight [I, O]
        return product(x, self.values, split=self.split)


def product(x: jax.Array, values: jax.Array, dtype: Any = None, *, split: int = 0) -> jax.Array:
    """x [T, I] times a weight that lies as values [..., I]: [T, ...], in `dtype` or that of x.

    `split`: the output axis that devices share. One that is not the first cannot be made one with those before it
    without all devices' parts.
    """
    *outputs, inputs = values.shape
    last = values.ndim - 1
    multiplied = partial(lax.dot_general, preferred_element_type=dtype)
    if len(x) > FEW and split:
        return jnp.stack([product(x, part, dtype, split=split - 1) for part in values], axis=1)
    if len(x) > FEW:  # of a weight of several output axes XLA would make a copy first
        out = multiplied(x, values.reshape(-1, inputs), (((1,), (1,)), ((), ())))
        return out.reshape(len(x), *outputs)
    # Without the barrier XLA would turn the product round, not its result.
    out = lax.optimization_barrier(multiplied(values, x, (((last,), (1,)), ((), ()))))
    return jnp.moveaxis(out, -1, 0)


def narrow_product(x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """x [T, I] times a weight of 8 bits that lies as values [..., I], with scale [..., 1]: [T, ...] in the dtype of x.

    A weight that is widened as a whole is written to memory and read again, which costs several times what its few
    bytes save. So it is widened block by block of outputs.
    """
    *outputs, inputs = values.shape
    rows = prod(outputs)
    blocks = _blocks(rows, inputs)
    parts = values.reshape(blocks, rows // blocks, inputs)
    out = lax.map(lambda part: product(x, part.astype(x.dtype)), parts)  # [blocks, T, rows / blocks]
    whole = jnp.moveaxis(out, 0, 1).reshape(len(x), *outputs)
    return (whole.astype(jnp.float32) * scale.reshape(1, *outputs)).astype(x.dtype)


def _blocks(rows: int, inputs: int) -> int:
    """The least number of equal blocks of outputs that each have BLOCK numbers at most, and LEAST; one for each output
    at most."""
    least = max(LEAST, -(-rows * inputs // BLOCK))
    return next((count for count in range(least, rows) if rows % count == 0), rows)
