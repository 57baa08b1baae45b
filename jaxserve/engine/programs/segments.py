"""Prompt steps as chains of programs, so that the host can preempt a step between two of them.

A chain is `begin` (embedding, attention plan), one segment per piece of the model, and `end` (last
norm, rows to sample from). A segment takes the weights and pools of its layers as arguments, so one
program serves all layers of a kind. The functions are those of the whole step (`registry`), split
between their calls.

Letters: T tokens, S rows, G sampling rows, E model dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.engine.programs.backends import Backends
from jaxserve.engine.programs.inputs import Batch, Bucket, Layout, Limits
from jaxserve.engine.programs.program import Program
from jaxserve.engine.programs.step import Tree, gathered, unpack
from jaxserve.models import registry
from jaxserve.models.layers import Part, Stream
from jaxserve.models.spec import ModelSpec
from jaxserve.sched.api.preemption import PARTS, SHORT, Boundary
from pallas_kernels.attention.api import Attention, Pool

CUT = (Part.MIX, Part.FEED)  # the parts of a layer at boundary `op`
assert len(CUT) == PARTS
Kind = tuple[tuple[int, ...], Part]  # kinds of a segment's layers, and the part of them that it computes


class Link(NamedTuple):
    """A segment of the chain."""

    layers: slice
    kind: Kind


def links(spec: ModelSpec, boundary: Boundary) -> tuple[Link, ...]:
    """Return the segments of a model, in order. `boundary` must not be the whole chunk."""
    parts = CUT if boundary.operators else (Part.WHOLE,)
    cuts = (slice(at, min(at + boundary.layers, spec.layers)) for at in range(0, spec.layers, boundary.layers))
    return tuple(Link(cut, (spec.kinds[cut], part)) for cut in cuts for part in parts)


class Segments:
    """The jitted segment functions of a model, shared by equal instances."""

    def __init__(
        self,
        spec: ModelSpec,
        mesh: Mesh,
        limits: Limits,
        boundary: Boundary,
        backends: Backends | None = None,
        short: int = SHORT,
    ) -> None:
        """backends: the resolved kernels; None: XLA. short: steps padded to fewer tokens run as a whole."""
        self._spec, self._limits = spec, limits
        self.links = links(spec, boundary)
        shape = mesh.abstract_mesh  # without devices, so that one trace serves every instance
        whole = NamedSharding(shape, PartitionSpec())
        prompts = [bucket for bucket in limits.buckets if bucket.prompts]
        least = min(short, max(prompts).tokens)
        self.buckets = tuple(bucket for bucket in prompts if bucket.tokens >= least)
        self._kernel: Attention = (backends or Backends()).kernel(shape, decode=False)
        self.begin: dict[Bucket, Program] = {}
        self.end: dict[Bucket, Program] = {}
        for bucket in self.buckets:
            begin = partial(_begin, spec=spec, limits=limits, bucket=bucket, kernel=self._kernel)
            self.begin[bucket] = Program(begin, f"begin_{bucket.tokens}", whole)
            self.end[bucket] = Program(partial(_end, spec=spec, bucket=bucket), f"end_{bucket.tokens}", whole)
        self.through: dict[Kind, Program] = {}
        for link in self.links:
            kinds, part = link.kind
            pools = pools_of(link, spec.cache.pools(NamedSharding(shape, spec.cache.partition)))
            program = partial(_through, spec=spec, kinds=kinds, part=part, kernel=self._kernel)
            name = f"{part.name.lower()}_{'_'.join(map(str, kinds))}"
            self.through.setdefault(link.kind, Program(program, name, (whole, pools), (1,)))

    def held_bytes(self, outer: Tree) -> int:
        """Return the bytes per device that the largest suspended step holds.

        outer: the weights outside the layers.
        """
        bucket = max(self.buckets)
        packed = jax.ShapeDtypeStruct((Layout.of(bucket, self._limits).end,), "int32")
        carry = jax.ShapeDtypeStruct((self._limits.slots, 1 + self._limits.draft), "int32")
        shapes = jax.eval_shape(
            partial(_begin, spec=self._spec, limits=self._limits, bucket=bucket, kernel=self._kernel),
            jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), outer),
            carry,
            packed,
        )
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


class Walk:
    """The progress of a step through its segments; it may pause between any two. Writer: `DeviceState`."""

    __slots__ = ("at", "batch", "last", "links", "stream")

    def __init__(self, batch: Batch, links: Sequence[Link]) -> None:
        self.batch = batch
        self.links = links
        self.at = 0  # segments dispatched
        self.stream: Stream | None = None
        self.last: jax.Array | None = None  # [S] int32, index in [T] of each row's last token

    @property
    def left(self) -> int:
        """The number of segments that have not been dispatched."""
        return len(self.links) - self.at

    @property
    def link(self) -> Link:
        """The next segment to dispatch."""
        return self.links[self.at]


def outside(weights: Tree) -> Tree:
    """Return the weights outside the layers, which `begin` and `end` take."""
    return {name: leaf for name, leaf in weights.items() if name != "layers"}


def pools_of(link: Link, pools: list[Any]) -> list[Any]:
    """Return the donated pools that a segment takes and returns; () for layers with untouched pools."""
    mine = pools[link.layers]
    return [()] * len(mine) if link.kind[1] is Part.FEED else mine


def _begin(
    outer: Tree,
    carry: jax.Array,
    packed: jax.Array,
    *,
    spec: ModelSpec,
    limits: Limits,
    bucket: Bucket,
    kernel: Attention,
) -> tuple[Stream, jax.Array]:
    tokens, ragged, last = unpack(packed, carry, bucket, limits, stateful=spec.delta is not None)
    return registry.begin(spec, outer, tokens, ragged, attention=kernel), last


def _through(
    layers: list[Tree],
    pools: list[Pool],
    stream: Stream,
    *,
    spec: ModelSpec,
    kinds: tuple[int, ...],
    part: Part,
    kernel: Attention,
) -> tuple[jax.Array, list[Pool]]:
    return registry.through(spec, kinds, layers, pools, stream, attention=kernel, part=part)


def _end(outer: Tree, x: jax.Array, last: jax.Array, *, spec: ModelSpec, bucket: Bucket) -> tuple[jax.Array, jax.Array]:
    """Return hidden states of the rows' last tokens [G, E], and of all tokens [T, E]."""
    hidden = registry.finish(spec, outer, x)
    return gathered(hidden, last, bucket), hidden
