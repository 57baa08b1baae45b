"""Choose the backend of products with 8-bit weights once, when an engine starts.

If each output has one scale, XLA widens the weight inside its own product, so a kernel would save
no bytes and is not used. If blocks of inputs have scales, XLA writes the widened weight to memory
and reads it again: five bytes for each byte the kernel reads. Decode is bound by these bytes; with
many tokens they no longer matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Choice, Here, anywhere, resolve
from pallas_kernels.mosaic.support import interpreter_of, unfit


@dataclass(frozen=True)
class MatmulSpec(Here):
    """The dtypes, scales and sharding of an engine's quantized weights."""

    dtype: str  # of activations
    weights: str  # dtype of the weights
    blocks: bool  # whether blocks of inputs have their own scales
    shards: int = 1  # devices that a weight is split over


class QuantizedMatmul(Protocol):
    """Products of activations [T, I] with values [I, O] times scale [n, O]."""

    def __call__(self, x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array | None:
        """Return the product [T, O] in the dtype of x; None: left to XLA."""


@dataclass(frozen=True)
class MosaicQuantizedMatmul:
    """The kernel of `hopper.py`, for the few tokens of decode."""

    spec: MatmulSpec

    def __call__(self, x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array | None:
        from pallas_kernels.ops.quantized_matmul import hopper

        dtype, stored = jnp.dtype(self.spec.dtype), jnp.dtype(self.spec.weights)
        spec = hopper.QuantizedSpec(
            len(x), values.shape[0], values.shape[1], len(scale), dtype, stored, self.spec.cores
        )
        if hopper.supports(spec) is not None:
            return None
        return hopper.quantized_matmul(
            x, values, scale, config=hopper.heuristic(spec), interpret=interpreter_of(self.spec)
        )


def supports(spec: MatmulSpec) -> str | None:
    """Return None, or the reason why the Hopper kernel is not used for `spec`."""

    if (reason := unfit(spec)) is not None:
        return reason
    if not spec.blocks:
        return "each output has one scale; XLA widens these weights inside its product and reads no more bytes"
    if spec.shards > 1:
        return f"weights are split over {spec.shards} devices; it needs whole weights"
    if spec.dtype not in ("bfloat16", "float16"):
        return f"activations are {spec.dtype}; it takes bfloat16 and float16"
    return None


def resolve_quantized_matmul(spec: MatmulSpec, name: str = "auto") -> Choice:
    """Resolve the backend of products with 8-bit weights; see `choice.resolve`."""
    return resolve(spec, name, {"mosaic_gpu": supports, "xla": anywhere}, "products")


def products(choice: Choice | None = None) -> QuantizedMatmul | None:
    """Build the products that `choice` resolved to; None: XLA's."""
    return None if choice is None or choice.backend == "xla" else MosaicQuantizedMatmul(choice.spec)
