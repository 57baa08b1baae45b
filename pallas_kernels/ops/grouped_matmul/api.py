"""Which products of a mixture of experts an engine runs: chosen once at its start, as its attention is.

An object plans once for each layer, as each has a router of its own, and multiplies twice by that work. It knows one
shard's experts; who splits them over devices calls it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Choice, Here, resolve
from pallas_kernels.ops.grouped_matmul import xla
from pallas_kernels.ops.grouped_matmul.plan import Groups, plan_experts

TILE = 16  # rows: on a CPU as good as 32 and 64 where there are many, and better where there are few
GPU_TILE = 64


@dataclass(frozen=True)
class Spec(Here):
    """What an engine asks. Sizes are those of one shard."""

    dtype: str  # of activations
    experts: int  # X
    dim: int  # E
    ff_dim: int  # F
    weights: str = ""  # dtype of the weights, where it is not `dtype`: of 8 bits, with scales
    block: int = 0  # of what is summed over that share a scale, at most; 0: all do


class Experts(Protocol):
    """The products of one shard's experts."""

    def plan(self, chosen: jax.Array, experts: int) -> Groups:
        """The work for chosen [Q] int32, out of `experts`; what is out of range is not computed."""

    def __call__(
        self, x: jax.Array, weight: jax.Array, work: Groups, *, scale: jax.Array | None = None, out_dtype: Any = None
    ) -> jax.Array:
        """x [R, I] with weights [X, I, O] of their own experts, [R, O]; see `xla.grouped_matmul`."""


@dataclass(frozen=True)
class XlaExperts:
    """Plain XLA, on any device."""

    tile: int = TILE

    def plan(self, chosen: jax.Array, experts: int) -> Groups:
        return plan_experts(chosen, experts=experts, tile=self.tile)

    def __call__(
        self, x: jax.Array, weight: jax.Array, work: Groups, *, scale: jax.Array | None = None, out_dtype: Any = None
    ) -> jax.Array:
        return xla.grouped_matmul(x, weight, work, tile=self.tile, scale=scale, out_dtype=out_dtype)


@dataclass(frozen=True)
class MosaicExperts:
    """The kernel of `hopper/matmul.py`. Rows of a tile follow from how many pairs a step has."""

    spec: Spec

    @cached_property
    def _interpret(self) -> Any:
        from pallas_kernels.mosaic.interpret import interpreter

        return interpreter() if self.spec.interpret else None

    def plan(self, chosen: jax.Array, experts: int) -> Groups:
        from pallas_kernels.ops.grouped_matmul.hopper import matmul

        return matmul.plan(chosen, experts)

    def __call__(
        self, x: jax.Array, weight: jax.Array, work: Groups, *, scale: jax.Array | None = None, out_dtype: Any = None
    ) -> jax.Array:
        from pallas_kernels.ops.grouped_matmul.hopper import matmul

        experts, width, outputs = weight.shape
        shape = matmul.Spec(len(work.place), experts, width, outputs, x.dtype, cores=self.spec.cores)
        if scale is not None:
            shape = replace(shape, stored=weight.dtype, scales=scale.shape[1])
        config = matmul.heuristic(shape)
        return matmul.grouped_matmul(
            x, weight, work, scale=scale, out_dtype=out_dtype, config=config, interpret=self._interpret
        )


class _Mosaic:
    """The backend `mosaic_gpu`."""

    @staticmethod
    def supports(spec: Spec) -> str | None:
        from pallas_kernels.mosaic.support import unfit
        from pallas_kernels.ops.grouped_matmul.hopper import matmul

        if (reason := unfit(spec)) is not None:
            return reason
        stored = jnp.dtype(spec.weights) if spec.weights not in ("", spec.dtype) else None
        for width, outputs in ((spec.dim, 2 * spec.ff_dim), (spec.ff_dim, spec.dim)):
            scales = width // gcd(width, spec.block) if spec.block else 1
            shape = matmul.Spec(1, spec.experts, width, outputs, jnp.dtype(spec.dtype), stored, scales, spec.cores)
            if (reason := matmul.supports(shape)) is not None:
                return reason
        return None

    @staticmethod
    def make(spec: Spec) -> Experts:
        return MosaicExperts(spec)


class _Xla:
    """The backend `xla`."""

    @staticmethod
    def supports(spec: Spec) -> str | None:
        return None

    @staticmethod
    def make(spec: Spec) -> Experts:
        return XlaExperts(GPU_TILE if spec.platform == "gpu" else TILE)


BACKENDS: Mapping[str, Any] = {"mosaic_gpu": _Mosaic, "xla": _Xla}


def resolve_experts(spec: Spec, name: str = "auto") -> Choice:
    """As `attention.api.resolve`, of a mixture of experts."""
    return resolve(spec, name, BACKENDS, "experts")


def experts(choice: Choice | None = None) -> Experts:
    """What was resolved; None: XLA."""
    if choice is None:
        return XlaExperts()
    made: Experts = BACKENDS[choice.backend].make(choice.spec)
    return made
