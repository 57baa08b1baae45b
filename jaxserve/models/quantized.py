"""8-bit weights with scales, and products with them.

    weight[..., i, ..., o] = values[..., i, ..., o] * scale[..., i // (I / n), ..., o]

where I is the axis that a product sums over and n the number of scales along it. With one scale (per
channel) the product reads the 8-bit values, whose conversion is exact, and its result is multiplied by
the scale. With several (per block) the weight is widened first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models.transposed import Stored, Transposed, narrow_product, product
from pallas_kernels.ops.grouped_matmul.api import Experts, Gate
from pallas_kernels.ops.grouped_matmul.plan import Groups
from pallas_kernels.ops.quantized_matmul.api import QuantizedMatmul


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=["axis", "by"])
@dataclass(frozen=True)
class Quantized(Stored):
    """An 8-bit weight: its values and scales, as arrays or descriptions."""

    values: Any  # int8 or float8
    scale: Any  # float32; of the shape of `values` except along `axis`
    axis: int = 0  # I
    by: QuantizedMatmul | None = None  # the kernel for products that it supports; see `multiplied_by`

    @property
    def transposed(self) -> bool:
        """Whether a weight [I, ...] is stored as values [..., I]; see `models/transposed.py`."""
        return self.axis > 0 and self.axis == len(self.values.shape) - 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        *outputs, last = self.values.shape
        return (last, *outputs) if self.transposed else (*outputs, last)

    def widened(self, dtype: Any) -> jax.Array:
        """Return the weight in `dtype`, multiplied in float32."""
        wide: jax.Array = (self.values.astype(jnp.float32) * self._spread()).astype(dtype)
        return wide

    def _spread(self) -> jax.Array:
        return jnp.repeat(self.scale, self.values.shape[self.axis] // self.scale.shape[self.axis], axis=self.axis)

    @property
    def per_channel(self) -> bool:
        return bool(self.scale.shape[self.axis] == 1)

    def __rmatmul__(self, x: jax.Array) -> jax.Array:  # x [..., I] @ weight [I, O]
        return einsum("...i,io->...o", x, self)


Weight = jax.Array | Quantized | Transposed


def einsum(subscripts: str, x: jax.Array, weight: Weight) -> jax.Array:
    """Compute `jnp.einsum` of x and a weight in any form. The last axes of the result are the weight's without I."""
    if isinstance(weight, Transposed):
        return product(x, weight.values, split=weight.split)
    if not isinstance(weight, Quantized):
        out: jax.Array = jnp.einsum(subscripts, x, weight)
        return out
    if weight.transposed:
        return narrow_product(x, weight.values, weight.scale)
    if (done := _by_kernel(x, weight)) is not None:
        return done
    if not weight.per_channel:
        return einsum(subscripts, x, weight.widened(x.dtype))
    wide = jnp.einsum(subscripts, x, weight.values.astype(x.dtype))
    scale = jnp.squeeze(weight.scale, weight.axis)
    return _times(wide, scale.reshape((1,) * (wide.ndim - scale.ndim) + scale.shape))


def _by_kernel(x: jax.Array, weight: Quantized) -> jax.Array | None:
    """Multiply x [T, I] by a weight [I, ...] with the weight's kernel; None if it does not support the product."""
    if weight.by is None or x.ndim != 2 or weight.axis != 0:
        return None
    (inputs, *outputs), scales = weight.shape, weight.scale.shape[0]
    out = weight.by(x, weight.values.reshape(inputs, -1), weight.scale.reshape(scales, -1))
    return None if out is None else out.reshape(len(x), *outputs)


def multiplied_by(tree: Any, products: QuantizedMatmul | None) -> Any:
    """Return the tree with `products` as the kernel of its quantized weights; None: XLA.

    Call it within a jitted program, not on the arrays that the engine holds.
    """

    def named(leaf: Any) -> Any:
        return replace(leaf, by=products) if isinstance(leaf, Quantized) else leaf

    return jax.tree.map(named, tree, is_leaf=lambda leaf: isinstance(leaf, Quantized))


def multiplied(
    kernel: Experts,
    x: jax.Array,  # [R, I], rows grouped by expert
    weight: Weight,  # [X, I, O]
    work: Groups,
    out_dtype: Any = None,
    gate: Gate | None = None,
) -> jax.Array:
    """Multiply rows by the weights of their experts, which may be quantized: [R, O], or [R, O / 2] with a gate."""
    assert not isinstance(weight, Transposed), "weights of experts are never transposed"
    if not isinstance(weight, Quantized):
        return kernel(x, weight, work, out_dtype=out_dtype, gate=gate)
    return kernel(x, weight.values, work, scale=weight.scale, out_dtype=out_dtype, gate=gate)


def _times(out: jax.Array, scale: jax.Array) -> jax.Array:
    return (out.astype(jnp.float32) * scale).astype(out.dtype)
