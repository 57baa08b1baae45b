"""Choose the backend of products with 8-bit weights once, when an engine starts.

If each output has one scale, XLA widens the weight inside its own product, so a kernel would save
no bytes and is not used. If blocks of inputs have scales, XLA writes the widened weight to memory
and reads it again: five bytes for each byte the kernel reads. Decode is bound by these bytes; with
many tokens they no longer matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Choice, Here, resolve


@dataclass(frozen=True)
class MatmulSpec(Here):
    """The dtypes, scales and sharding of an engine's quantized weights."""

    dtype: str  # of activations
    weights: str  # dtype of the weights
    blocks: bool  # whether blocks of inputs have their own scales
    shards: int = 1  # devices that a weight is split over


class QuantizedMatmul(Protocol):
    """Products of activations [T, I] with values [I, O] times scale [n, O]."""

    def takes(self, tokens: int, inputs: int, outputs: int, scales: int) -> bool:
        """Return whether it computes this shape, or leaves it to XLA."""

    def __call__(self, x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
        """Return the product [T, O] in the dtype of x."""


@dataclass(frozen=True)
class XlaQuantizedMatmul:
    """The XLA backend: takes no shape, because callers write XLA's products themselves, for any number of axes."""

    def takes(self, tokens: int, inputs: int, outputs: int, scales: int) -> bool:
        return False

    def __call__(self, x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
        raise NotImplementedError("XLA takes no shape here: call `takes` first")


@dataclass(frozen=True)
class MosaicQuantizedMatmul:
    """The kernel of `hopper.py`, for the few tokens of decode."""

    spec: MatmulSpec

    def takes(self, tokens: int, inputs: int, outputs: int, scales: int) -> bool:
        from pallas_kernels.ops.quantized_matmul import hopper

        return hopper.supports(self._shape(inputs, outputs, tokens=tokens, scales=scales)) is None

    def __call__(self, x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
        from pallas_kernels.mosaic.interpret import interpreter
        from pallas_kernels.ops.quantized_matmul import hopper

        config = hopper.heuristic(self._shape(*values.shape, tokens=len(x), scales=len(scale)))
        return hopper.quantized_matmul(
            x, values, scale, config=config, interpret=interpreter() if self.spec.interpret else None
        )

    def _shape(self, inputs: int, outputs: int, *, tokens: int, scales: int) -> Any:
        from pallas_kernels.ops.quantized_matmul import hopper

        dtype, stored = jnp.dtype(self.spec.dtype), jnp.dtype(self.spec.weights)
        return hopper.QuantizedSpec(tokens, inputs, outputs, scales, dtype, stored, self.spec.cores)


class _Mosaic:
    """The backend `mosaic_gpu`."""

    @staticmethod
    def supports(spec: MatmulSpec) -> str | None:
        from pallas_kernels.mosaic.support import unfit

        if (reason := unfit(spec)) is not None:
            return reason
        if not spec.blocks:
            return "each output has one scale; XLA widens these weights inside its product and reads no more bytes"
        if spec.shards > 1:
            return f"weights are split over {spec.shards} devices; it needs whole weights"
        if spec.dtype not in ("bfloat16", "float16"):
            return f"activations are {spec.dtype}; it takes bfloat16 and float16"
        return None

    @staticmethod
    def make(spec: MatmulSpec) -> QuantizedMatmul:
        return MosaicQuantizedMatmul(spec)


class _Xla:
    """The backend `xla`."""

    @staticmethod
    def supports(spec: MatmulSpec) -> str | None:
        return None

    @staticmethod
    def make(spec: MatmulSpec) -> QuantizedMatmul:
        return XlaQuantizedMatmul()


BACKENDS: Mapping[str, Any] = {"mosaic_gpu": _Mosaic, "xla": _Xla}


def resolve_quantized_matmul(spec: MatmulSpec, name: str = "auto") -> Choice:
    """Resolve the backend of products with 8-bit weights; see `choice.resolve`."""
    return resolve(spec, name, BACKENDS, "products")


def products(choice: Choice | None = None) -> QuantizedMatmul:
    """Build the products that `choice` resolved to; None for XLA."""
    if choice is None:
        return XlaQuantizedMatmul()
    made: QuantizedMatmul = BACKENDS[choice.backend].make(choice.spec)
    return made
