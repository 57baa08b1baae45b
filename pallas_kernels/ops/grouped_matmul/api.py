"""Choose the backend of expert products once, when an engine starts.

Each MoE layer has its own router, so an object plans once per layer; both products of the layer
share that work. An object handles the experts of one shard; callers that shard experts over devices
call it once per shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Choice, Here, anywhere, resolve
from pallas_kernels.mosaic.support import interpreter_of, unfit
from pallas_kernels.ops.grouped_matmul import xla
from pallas_kernels.ops.grouped_matmul.plan import Groups, plan_experts

Gate = Callable[[jax.Array, jax.Array], jax.Array]  # combines the products with gates and with values, [..., F] each
TILE = 16  # rows; on a CPU as fast as 32 and 64 with many rows, and faster with few
GPU_TILE = 64


@dataclass(frozen=True)
class ExpertsSpec(Here):
    """The dtypes and sizes of one shard's experts."""

    dtype: str  # of activations
    experts: int  # X
    dim: int  # E
    ff_dim: int  # F
    weights: str = ""  # dtype of 8-bit weights with scales; "" if the weights are `dtype`
    block: int = 0  # maximum inputs that share a scale; 0: all


class ProductOptions(TypedDict, total=False):
    """The options of an expert product."""

    scale: jax.Array | None  # [X, n, O] float32, of 8-bit weights
    out_dtype: Any  # None: that of x
    gate: Gate | None  # return its result for the two halves of each product, [R, O / 2]


@dataclass(frozen=True)
class XlaExperts:
    """Plain XLA, on any device."""

    tile: int = TILE

    def plan(self, chosen: jax.Array, experts: int) -> Groups:
        """Plan the work for chosen [Q] int32, out of `experts`; out-of-range choices are not computed."""
        return plan_experts(chosen, experts=experts, tile=self.tile)

    def __call__(self, x: jax.Array, weight: jax.Array, work: Groups, **options: Unpack[ProductOptions]) -> jax.Array:
        """Multiply x [R, I] by the weights [X, I, O] of each row's expert, [R, O]; see `xla.grouped_matmul`."""
        scale, out_dtype, gate = options.get("scale"), options.get("out_dtype"), options.get("gate")
        out = xla.grouped_matmul(x, weight, work, tile=self.tile, scale=scale, out_dtype=out_dtype)
        return out if gate is None else gate(*jnp.split(out, 2, axis=1))


@dataclass(frozen=True)
class MosaicExperts:
    """The kernel of `hopper/matmul.py`, whose tile size follows from the number of pairs in a step."""

    spec: ExpertsSpec

    def plan(self, chosen: jax.Array, experts: int) -> Groups:
        from pallas_kernels.ops.grouped_matmul.hopper import matmul

        return matmul.plan(chosen, experts)

    def __call__(self, x: jax.Array, weight: jax.Array, work: Groups, **options: Unpack[ProductOptions]) -> jax.Array:
        from pallas_kernels.ops.grouped_matmul.hopper import matmul

        gated = options.get("gate") is not None
        spec = matmul.spec_of(len(work.place), x, weight, options.get("scale"), gated, self.spec.cores)
        config = matmul.heuristic(spec)
        return matmul.grouped_matmul(x, weight, work, **options, config=config, interpret=interpreter_of(self.spec))


Experts = XlaExperts | MosaicExperts  # the products of one shard's experts


def supports(spec: ExpertsSpec) -> str | None:
    """Return None, or the reason why the Hopper kernel cannot run `spec`."""
    from pallas_kernels.ops.grouped_matmul.hopper import matmul

    if (reason := unfit(spec)) is not None:
        return reason
    stored = jnp.dtype(spec.weights) if spec.weights not in ("", spec.dtype) else None
    for width, outputs, gated in ((spec.dim, 2 * spec.ff_dim, True), (spec.ff_dim, spec.dim, False)):
        scales = width // gcd(width, spec.block) if spec.block else 1
        shape = matmul.GroupedSpec(
            1, spec.experts, width, outputs, jnp.dtype(spec.dtype), stored, scales, spec.cores, gated
        )
        if (reason := matmul.supports(shape)) is not None:
            return reason
    return None


def resolve_experts(spec: ExpertsSpec, name: str = "auto") -> Choice:
    """Resolve the backend of expert products; see `choice.resolve`."""
    return resolve(spec, name, {"mosaic_gpu": supports, "xla": anywhere}, "experts")


def experts(choice: Choice | None = None) -> Experts:
    """Build the products that `choice` resolved to; None for XLA."""
    if choice is None:
        return XlaExperts()
    if choice.backend == "mosaic_gpu":
        return MosaicExperts(choice.spec)
    return XlaExperts(GPU_TILE if choice.spec.platform == "gpu" else TILE)
