"""Choose the backend of top-k, top-p and min-p thresholds once, when an engine starts.

A row's threshold is the lowest logit that is kept, so on any backend the tokens to draw from are
those with `x >= threshold`. `search.py` describes the search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.choice import Choice, Here, resolve
from pallas_kernels.ops.sampling_threshold import xla
from pallas_kernels.ops.sampling_threshold.search import Found, Options


@dataclass(frozen=True)
class ThresholdSpec(Here):
    """The device and vocabulary of an engine."""

    vocab: int  # V


class Thresholds(Protocol):
    """A backend's computation of the thresholds of rows."""

    def __call__(self, x: jax.Array, options: Options) -> Found:
        """Return threshold and sweeps [G] of x [G, V] float32 and options [G]."""


@dataclass(frozen=True)
class XlaThresholds:
    """Plain XLA, on any device."""

    def __call__(self, x: jax.Array, options: Options) -> Found:
        return xla.thresholds(x, options)


@dataclass(frozen=True)
class MosaicThresholds:
    """The kernel of `hopper.py`. With several devices, each has all logits and searches all rows."""

    spec: ThresholdSpec
    mesh: Mesh | AbstractMesh | None = None

    def __call__(self, x: jax.Array, options: Options) -> Found:
        if self.mesh is None or self.mesh.size == 1:
            return self._local(x, options)
        run = jax.shard_map(self._local, mesh=self.mesh, in_specs=P(), out_specs=P(), check_vma=False)
        found: Found = run(x, options)
        return found

    def _local(self, x: jax.Array, options: Options) -> Found:
        from pallas_kernels.mosaic.interpret import interpreter
        from pallas_kernels.ops.sampling_threshold import hopper

        told = interpreter() if self.spec.interpret else None
        return hopper.thresholds(x, options, config=hopper.heuristic(x.shape[1]), interpret=told)


class _Mosaic:
    """The backend `mosaic_gpu`."""

    @staticmethod
    def supports(spec: ThresholdSpec) -> str | None:
        from pallas_kernels.mosaic.support import unfit
        from pallas_kernels.ops.sampling_threshold import hopper

        return unfit(spec) or hopper.supports(spec.vocab)

    @staticmethod
    def make(spec: ThresholdSpec, mesh: Mesh | AbstractMesh | None) -> Thresholds:
        return MosaicThresholds(spec, mesh)


class _Xla:
    """The backend `xla`."""

    @staticmethod
    def supports(spec: ThresholdSpec) -> str | None:
        return None

    @staticmethod
    def make(spec: ThresholdSpec, mesh: Mesh | AbstractMesh | None) -> Thresholds:
        return XlaThresholds()


BACKENDS: Mapping[str, Any] = {"mosaic_gpu": _Mosaic, "xla": _Xla}


def resolve_sampling(spec: ThresholdSpec, name: str = "auto") -> Choice:
    """Resolve the sampling backend; see `choice.resolve`."""
    return resolve(spec, name, BACKENDS, "sampling")


def thresholds(choice: Choice | None = None, mesh: Mesh | AbstractMesh | None = None) -> Thresholds:
    """Build the thresholds that `choice` resolved to, over the devices of `mesh`; None for XLA."""
    if choice is None:
        return XlaThresholds()
    made: Thresholds = BACKENDS[choice.backend].make(choice.spec, mesh)
    return made
