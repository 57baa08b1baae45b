"""Measure the scales of an 8-bit KV cache from one forward pass.

    scale[k] = headroom * max |x[:, k]| / largest value of the pool's dtype

for keys (after rotary embedding) and values of every layer. Larger values at run time saturate.
Scales belong to the engine, not to a page: one measurement serves all instances, so pages are
transferred without scales.

A latent (MLA) has no heads and gets a scale per column, because a few columns are often far larger
than the rest. The two columns of a rotary pair share a scale that covers every position.

Letters: T tokens, E model dim, H query heads, K kv heads (or copies of a latent), G = H / K, D head
dim (or columns).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models import registry
from jaxserve.models.spec import ModelSpec
from pallas_kernels.attention.api import AttentionInputs, Pool
from pallas_kernels.layout import MASKED, Ragged
from pallas_kernels.ops.gated_matmul.api import GatedMatmul
from pallas_kernels.ops.grouped_matmul.api import Experts, XlaExperts
from pallas_kernels.ops.kv_write.xla import LARGEST
from pallas_kernels.ops.paged_attention.sinks import with_sinks
from pallas_kernels.ops.quantized_matmul.api import QuantizedMatmul
from pallas_kernels.rope import rotate

log = logging.getLogger(__name__)

Tree = Any
Floats = npt.NDArray[np.float32]

TOKENS = 256
# float8 keeps its relative precision with headroom; integers lose resolution, so they get less.
HEADROOM = {"float8_e4m3fn": 4.0, "int8": 1.25}
COLUMN_HEADROOM = {"float8_e4m3fn": 4.0, "int8": 2.0}  # a column's maximum is over fewer values
STEPS_PER_OCTAVE = 8  # resolution of scales: rounding hides differences in the last bits between meshes


@dataclass(frozen=True)
class Observer:
    """An attention that stores no pages and records the largest magnitudes.

    Its pool is the largest key and value of each head, two arrays [K], or for a latent the largest
    value of each column, one array [K, D].
    """

    mesh: Mesh
    experts: Experts = field(default_factory=XlaExperts)
    products: QuantizedMatmul | None = None
    mlp: GatedMatmul | None = None
    decode: bool = False

    def plan(self, ragged: Ragged) -> Ragged:
        return ragged

    def __call__(self, inputs: AttentionInputs, pool: Pool, work: Ragged) -> tuple[jax.Array, Pool]:
        """Attend over one row that starts at position 0."""
        q, k, softcap, sinks = inputs.q, rotate(inputs.k, inputs.turn), inputs.softcap, inputs.sinks
        tokens, kv_heads, dim = k.shape
        kept, axes = ((k,), (0,)) if inputs.v is None else ((k, inputs.v), (0, 2))
        v = kept[-1].astype(q.dtype)
        grouped = rotate(q, inputs.turn).reshape(tokens, kv_heads, -1, dim)
        score = jnp.einsum("tkgd,ckd->kgtc", grouped, k, preferred_element_type=jnp.float32) * inputs.scale
        if softcap is not None:
            score = softcap * jnp.tanh(score / softcap)
        ahead = work.positions[:, None] - work.positions[None, :]  # [T, T]
        seen = (ahead >= 0) & (ahead < (inputs.window or tokens))
        score = jnp.where(seen[None, None], score, MASKED)
        mixed = jnp.einsum("kgtc,ckd->tkgd", jax.nn.softmax(score, axis=-1).astype(v.dtype), v).reshape(q.shape)
        if sinks is not None:
            total = jax.nn.logsumexp(score, axis=-1)  # [K, G, T]
            mixed = with_sinks(mixed, jnp.moveaxis(total, -1, 0).reshape(q.shape[:2]), sinks)
        return mixed, tuple(
            jnp.maximum(peak, jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axes))
            for peak, x in zip(pool, kept, strict=True)
        )


def with_kv_scales(spec: ModelSpec, trees: Sequence[Tree], meshes: Sequence[Mesh], dtype: Any) -> list[Tree]:
    """Return the weight trees with scales for pools of `dtype`.

    Scales are measured on the first mesh and equal on all.
    """
    name, columns = jnp.dtype(dtype).name, spec.cache.latent
    largest = (COLUMN_HEADROOM if columns else HEADROOM)[name] / LARGEST[name]
    leaves = ("kv_scale",) if columns else ("k_scale", "v_scale")
    scales = [
        {leaf: rounded_up(peak * largest) for leaf, peak in zip(leaves, layer, strict=True)}
        for layer in peaks(spec, trees[0], meshes[0])
    ]
    log.info("KV cache %s: scales of %d layers measured on %d tokens", name, spec.layers, TOKENS)
    placed: dict[Mesh, Tree] = {}
    for tree, mesh in zip(trees, meshes, strict=True):
        if mesh not in placed:
            placed[mesh] = _placed(tree, scales, NamedSharding(mesh, PartitionSpec(None if columns else "tp")))
    return [placed[mesh] for mesh in meshes]


def _placed(tree: Tree, by_layer: Sequence[dict[str, Floats]], where: NamedSharding) -> Tree:
    layers = [
        {**layer, "attention": {**layer["attention"], **jax.device_put(scales, where)}}
        for layer, scales in zip(tree["layers"], by_layer, strict=True)
    ]
    return {**tree, "layers": layers}


def peaks(spec: ModelSpec, tree: Tree, mesh: Mesh) -> list[tuple[Floats, ...]]:
    """Measure each layer's largest key and value of each kv head, two arrays [K], on random tokens.

    For a latent: the largest value of each column, one array [D].
    """
    count = min(TOKENS, spec.max_positions)
    tokens = np.random.default_rng(0).integers(0, spec.vocab, count).astype(np.int32)
    index, length = np.arange(count, dtype=np.int32), np.full(1, count, np.int32)
    unused = np.zeros((1, 1), np.int32)
    rows = (index, np.zeros_like(index), index, np.zeros(1, np.int32), length, length, unused)
    ragged = Ragged.of(map(jnp.asarray, rows))
    run = jax.jit(partial(_observed, spec=spec, attention=Observer(mesh)))
    shape = (spec.pool_heads,) if spec.latent is None else (spec.pool_heads, spec.cache.dim)
    empty = [(np.zeros(shape, np.float32),) * spec.cache.parts] * spec.layers
    seen = jax.device_get(run(tree, empty, tokens, ragged))
    if spec.latent is None:
        return [tuple(map(np.asarray, layer)) for layer in seen]
    return [(_turned(np.asarray(layer[0][0]), spec.latent.rank),) for layer in seen]  # all copies are equal


def _turned(peak: Floats, rank: int) -> Floats:
    """Bound the last Z columns of peak [R + Z] over all rotations: both of a pair get its norm."""
    left, right = np.split(peak[rank:], 2)
    return np.concatenate([peak[:rank], np.tile(np.hypot(left, right), 2)])


def _observed(
    weights: Tree, pools: list[Pool], tokens: jax.Array, ragged: Ragged, *, spec: ModelSpec, attention: Observer
) -> list[Pool]:
    return registry.forward(spec, weights, pools, tokens, ragged, attention=attention)[1]


def rounded_up(x: Floats) -> Floats:
    """Round x [K] up to the next of `STEPS_PER_OCTAVE` steps; zeros become the smallest normal number."""
    steps = np.ceil(np.log2(np.maximum(x, np.finfo(np.float32).tiny)) * STEPS_PER_OCTAVE - 1e-3)
    return np.exp2(steps / STEPS_PER_OCTAVE).astype(np.float32)
