"""Who finds what top-k, top-p and min-p leave in: chosen once at an engine's start, as its attention is.

A row's border is the least logit that is kept, so `x >= border` is what is drawn from, on any backend; how it is
searched is told in `border_search.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.border_search import Found, Options
from pallas_kernels.choice import Choice, Here, resolve
from pallas_kernels.xla import borders as xla


@dataclass(frozen=True)
class Spec(Here):
    """What an engine asks."""

    vocab: int  # V


class Borders(Protocol):
    """Borders of rows."""

    def __call__(self, x: jax.Array, options: Options) -> Found:
        """x [G, V] float32, options [G] -> border and sweeps [G]."""


@dataclass(frozen=True)
class XlaBorders:
    """Plain XLA, on any device."""

    def __call__(self, x: jax.Array, options: Options) -> Found:
        return xla.borders(x, options)


@dataclass(frozen=True)
class MosaicBorders:
    """The kernel of `hopper/borders.py`. Of several devices each searches all rows: it has all logits."""

    spec: Spec
    mesh: Mesh | AbstractMesh | None = None

    def __call__(self, x: jax.Array, options: Options) -> Found:
        if self.mesh is None or self.mesh.size == 1:
            return self._local(x, options)
        run = jax.shard_map(self._local, mesh=self.mesh, in_specs=P(), out_specs=P(), check_vma=False)
        found: Found = run(x, options)
        return found

    def _local(self, x: jax.Array, options: Options) -> Found:
        from pallas_kernels.hopper import borders
        from pallas_kernels.interpret import interpreter

        told = interpreter() if self.spec.interpret else None
        return borders.borders(x, options, config=borders.heuristic(x.shape[1]), interpret=told)


class _Mosaic:
    """The backend `mosaic_gpu`."""

    @staticmethod
    def supports(spec: Spec) -> str | None:
        from pallas_kernels.backends.mosaic_gpu import unfit
        from pallas_kernels.hopper import borders

        return unfit(spec) or borders.supports(spec.vocab)

    @staticmethod
    def make(spec: Spec, mesh: Mesh | AbstractMesh | None) -> Borders:
        return MosaicBorders(spec, mesh)


class _Xla:
    """The backend `xla`."""

    @staticmethod
    def supports(spec: Spec) -> str | None:
        return None

    @staticmethod
    def make(spec: Spec, mesh: Mesh | AbstractMesh | None) -> Borders:
        return XlaBorders()


BACKENDS: Mapping[str, Any] = {"mosaic_gpu": _Mosaic, "xla": _Xla}


def resolve_sampling(spec: Spec, name: str = "auto") -> Choice:
    """As `dispatch.resolve`, of the borders of what is sampled."""
    return resolve(spec, name, BACKENDS, "sampling")


def borders(choice: Choice | None = None, mesh: Mesh | AbstractMesh | None = None) -> Borders:
    """What was resolved, over the devices of `mesh`; None: XLA."""
    if choice is None:
        return XlaBorders()
    made: Borders = BACKENDS[choice.backend].make(choice.spec, mesh)
    return made
