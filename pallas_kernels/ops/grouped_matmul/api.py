"""Choose the backend of expert products once, when an engine starts.

Each MoE layer has its own router, so an object plans once per layer; both products of the layer
share that work. An object handles the experts of one shard; callers that shard experts over devices
call it once per shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Choice, Here, resolve
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


class Experts(Protocol):
    """The products of one shard's experts."""

    def plan(self, chosen: jax.Array, experts: int) -> Groups:
        """Plan the work for chosen [Q] int32, out of `experts`; out-of-range choices are not computed."""

    def __call__(
        self,
        x: jax.Array,
        weight: jax.Array,
        work: Groups,
        *,
        scale: jax.Array | None = None,
        out_dtype: Any = None,
        gate: Gate | None = None,
    ) -> jax.Array:
        """Multiply x [R, I] by the weights [X, I, O] of each row's expert, [R, O]; see `xla.grouped_matmul`.

        `gate`: return its result for the two halves of each product, [R, O / 2].
        """


@dataclass(frozen=True)
class XlaExperts:
    """Plain XLA, on any device."""

    tile: int = TILE

    def plan(self, chosen: jax.Array, experts: int) -> Groups:
        return plan_experts(chosen, experts=experts, tile=self.tile)

    def __call__(
        self,
        x: jax.Array,
        weight: jax.Array,
        work: Groups,
        *,
        scale: jax.Array | None = None,
        out_dtype: Any = None,
        gate: Gate | None = None,
    ) -> jax.Array:
        out = xla.grouped_matmul(x, weight, work, tile=self.tile, scale=scale, out_dtype=out_dtype)
        return out if gate is None else gate(*jnp.split(out, 2, axis=1))


@dataclass(frozen=True)
class MosaicExperts:
    """The kernel of `hopper/matmul.py`, whose tile size follows from the number of pairs in a step."""

    spec: ExpertsSpec

    @cached_property
    def _interpret(self) -> Any:
        from pallas_kernels.mosaic.interpret import interpreter

        return interpreter() if self.spec.interpret else None

    def plan(self, chosen: jax.Array, experts: int) -> Groups:
        from pallas_kernels.ops.grouped_matmul.hopper import matmul

        return matmul.plan(chosen, experts)

    def __call__(
        self,
        x: jax.Array,
        weight: jax.Array,
        work: Groups,
        *,
        scale: jax.Array | None = None,
        out_dtype: Any = None,
        gate: Gate | None = None,
    ) -> jax.Array:
        from pallas_kernels.ops.grouped_matmul.hopper import matmul

        experts, width, outputs = weight.shape
        shape = matmul.GroupedSpec(len(work.place), experts, width, outputs, x.dtype, cores=self.spec.cores)
        shape = replace(shape, gated=gate is not None)
        if scale is not None:
            shape = replace(shape, stored=weight.dtype, scales=scale.shape[1])
        config = matmul.heuristic(shape)
        return matmul.grouped_matmul(
            x, weight, work, scale=scale, out_dtype=out_dtype, gate=gate, config=config, interpret=self._interpret
        )


class _Mosaic:
    """The backend `mosaic_gpu`."""

    @staticmethod
    def supports(spec: ExpertsSpec) -> str | None:
        from pallas_kernels.mosaic.support import unfit
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

    @staticmethod
    def make(spec: ExpertsSpec) -> Experts:
        return MosaicExperts(spec)


class _Xla:
    """The backend `xla`."""

    @staticmethod
    def supports(spec: ExpertsSpec) -> str | None:
        return None

    @staticmethod
    def make(spec: ExpertsSpec) -> Experts:
        return XlaExperts(GPU_TILE if spec.platform == "gpu" else TILE)


BACKENDS: Mapping[str, Any] = {"mosaic_gpu": _Mosaic, "xla": _Xla}


def resolve_experts(spec: ExpertsSpec, name: str = "auto") -> Choice:
    """Resolve the backend of expert products; see `choice.resolve`."""
    return resolve(spec, name, BACKENDS, "experts")


def experts(choice: Choice | None = None) -> Experts:
    """Build the products that `choice` resolved to; None for XLA."""
    if choice is None:
        return XlaExperts()
    made: Experts = BACKENDS[choice.backend].make(choice.spec)
    return made
