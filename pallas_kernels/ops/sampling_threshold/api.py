"""Choose the backend of top-k, top-p and min-p thresholds once, when an engine starts.

A row's threshold is the lowest logit that is kept, so on any backend the tokens to draw from are
those with `x >= threshold`. `search.py` describes the search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.choice import Choice, Here, anywhere, resolve
from pallas_kernels.mosaic.support import interpreter_of, unfit
from pallas_kernels.ops.sampling_threshold import xla
from pallas_kernels.ops.sampling_threshold.search import Found, Options


@dataclass(frozen=True)
class ThresholdSpec(Here):
    """The device and vocabulary of an engine."""

    vocab: int  # V


# From x [G, V] float32 and options [G] to threshold and sweeps [G]. XLA's is `xla.thresholds`.
Thresholds = Callable[[jax.Array, Options], Found]


@dataclass(frozen=True)
class MosaicThresholds:
    """The kernel of `hopper.py`. With several devices, each has all logits and searches all rows."""

    spec: ThresholdSpec
    mesh: Mesh | AbstractMesh | None = None

    def __call__(self, x: jax.Array, options: Options) -> Found:
        if self.mesh is None or self.mesh.size == 1:
            return self._local(x, options)
        run = jax.shard_map(self._local, mesh=self.mesh, in_specs=P(), out_specs=P(), check_vma=False)
        thresholds: Found = run(x, options)
        return thresholds

    def _local(self, x: jax.Array, options: Options) -> Found:
        from pallas_kernels.ops.sampling_threshold import hopper

        config = hopper.heuristic(x.shape[1])
        return hopper.thresholds(x, options, config=config, interpret=interpreter_of(self.spec))


def supports(spec: ThresholdSpec) -> str | None:
    """Return None, or the reason why the Hopper kernel cannot run `spec`."""
    from pallas_kernels.ops.sampling_threshold import hopper

    return unfit(spec) or hopper.supports(spec.vocab)


def resolve_sampling(spec: ThresholdSpec, name: str = "auto") -> Choice:
    """Resolve the sampling backend; see `choice.resolve`."""
    return resolve(spec, name, {"mosaic_gpu": supports, "xla": anywhere}, "sampling")


def thresholds(choice: Choice | None = None, mesh: Mesh | AbstractMesh | None = None) -> Thresholds:
    """Build the thresholds that `choice` resolved to, over the devices of `mesh`; None for XLA."""
    return xla.thresholds if choice is None or choice.backend == "xla" else MosaicThresholds(choice.spec, mesh)
