"""Who finds what top-k, top-p and min-p leave in: chosen once at an engine's start, as its attention is.

A row's threshold is the least logit that is kept, so `x >= threshold` is what is drawn from, on any backend; how it is
searched is told in `search.py`.
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
class Spec(Here):
    """What an engine asks."""

    vocab: int  # V


class Thresholds(Protocol):
    """Thresholds of rows."""

    def __call__(self, x: jax.Array, options: Options) -> Found:
        """x [G, V] float32, options [G] -> threshold and sweeps [G]."""


@dataclass(frozen=True)
class XlaThresholds:
    """Plain XLA, on any device."""

    def __call__(self, x: jax.Array, options: Options) -> Found:
        return xla.thresholds(x, options)


@dataclass(frozen=True)
class MosaicThresholds:
    """The kernel of `hopper.py`. Of several devices each searches all rows: it has all logits."""

    spec: Spec
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
    def supports(spec: Spec) -> str | None:
        from pallas_kernels.mosaic.support import unfit
        from pallas_kernels.ops.sampling_threshold import hopper

        return unfit(spec) or hopper.supports(spec.vocab)

    @staticmethod
    def make(spec: Spec, mesh: Mesh | AbstractMesh | None) -> Thresholds:
        return MosaicThresholds(spec, mesh)


class _Xla:
    """The backend `xla`."""

    @staticmethod
    def supports(spec: Spec) -> str | None:
        return None

    @staticmethod
    def make(spec: Spec, mesh: Mesh | AbstractMesh | None) -> Thresholds:
        return XlaThresholds()


BACKENDS: Mapping[str, Any] = {"mosaic_gpu": _Mosaic, "xla": _Xla}


def resolve_sampling(spec: Spec, name: str = "auto") -> Choice:
    """As `attention.api.resolve`, of the thresholds of what is sampled."""
    return resolve(spec, name, BACKENDS, "sampling")


def thresholds(choice: Choice | None = None, mesh: Mesh | AbstractMesh | None = None) -> Thresholds:
    """What was resolved, over the devices of `mesh`; None: XLA."""
    if choice is None:
        return XlaThresholds()
    made: Thresholds = BACKENDS[choice.backend].make(choice.spec, mesh)
    return made
