"""Weights that lie as [out, in], and products with them: what a CPU multiplies few tokens by fastest.

XLA's library for a CPU reads the left operand of a product in place and packs the right one first, at every step. So
here the weight is on the left, and the result [out, tokens] is turned round: of 8 tokens and a weight [1024, 5632] that
takes 0.6 of the time, which is that of reading the weight once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

FEW = 128  # tokens; of more, packing a weight is a small part


@partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=[])
@dataclass(frozen=True)
class Transposed:
    """A weight [I, ...] as values [..., I]: an array, or its description."""

    values: Any

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
        return product(x, self.values)


def product(x: jax.Array, values: jax.Array, dtype: Any = None) -> jax.Array:
    """x [T, I] times a weight that lies as values [..., I]: [T, ...], in `dtype` or that of x."""
    last = values.ndim - 1
    multiplied = partial(lax.dot_general, preferred_element_type=dtype)
    if len(x) > FEW:
        return multiplied(x, values, (((1,), (last,)), ((), ())))
    # Without the barrier XLA would turn the product round, not its result.
    out = lax.optimization_barrier(multiplied(values, x, (((last,), (1,)), ((), ()))))
    return jnp.moveaxis(out, -1, 0)
