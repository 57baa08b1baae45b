"""Scales of an 8-bit KV cache: one step over some tokens tells how large keys and values of each head become.

    scale[k] = headroom * max |x[:, k]| / largest value of the pool's dtype

for keys (turned) and values of every layer. What a text makes larger than that is cut off. Scales are facts of an
engine, not of a page: one measurement serves all instances, so pages travel without them.

Letters: T tokens, E model dim, H query heads, K kv heads, G = H / K, D head dim.
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
from pallas_kernels.dispatch import Pool
from pallas_kernels.experts import Experts, XlaExperts
from pallas_kernels.layout import MASKED, Ragged, Scales
from pallas_kernels.products import Products, XlaProducts
from pallas_kernels.rope import Turn, rotate
from pallas_kernels.sinks import with_sinks
from pallas_kernels.xla.write import LARGEST

log = logging.getLogger(__name__)

Tree = Any

TOKENS = 256
# A float8 loses nothing to room above, so it gets more of it. Integers lose a step in as many.
HEADROOM = {"float8_e4m3fn": 4.0, "int8": 1.25}
STEPS_PER_OCTAVE = 8  # scales are rounded up to these: another mesh's last bits must not make another scale


@dataclass(frozen=True)
class Observer:
    """An attention that keeps no pages: its pool is the largest key and value of each head, two arrays [K]."""

    mesh: Mesh
    experts: Experts = field(default_factory=XlaExperts)
    products: Products = field(default_factory=XlaProducts)

    def plan(self, ragged: Ragged) -> Ragged:
        return ragged

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        turn: Turn | None,
        pool: Pool,
        work: Ragged,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: jax.Array | None = None,
        scales: Scales | None = None,
    ) -> tuple[jax.Array, Pool]:
        """Attention of one row that begins at position 0: q [T, H, D], k and v [T, K, D] -> [T, H, D]."""
        assert v is not None, "a latent has no scales"
        tokens, kv_heads, dim = k.shape
        k = rotate(k, turn)
        grouped = rotate(q, turn).reshape(tokens, kv_heads, -1, dim)
        score = jnp.einsum("tkgd,ckd->kgtc", grouped, k, preferred_element_type=jnp.float32) * scale
        if softcap is not None:
            score = softcap * jnp.tanh(score / softcap)
        ahead = work.positions[:, None] - work.positions[None, :]  # [T, T]
        seen = (ahead >= 0) & (ahead < (window or tokens))
        score = jnp.where(seen[None, None], score, MASKED)
        mixed = jnp.einsum("kgtc,ckd->tkgd", jax.nn.softmax(score, axis=-1).astype(v.dtype), v).reshape(q.shape)
        if sinks is not None:
            total = jax.nn.logsumexp(score, axis=-1)  # [K, G, T]
            mixed = with_sinks(mixed, jnp.moveaxis(total, -1, 0).reshape(q.shape[:2]), sinks)
        largest = tuple(
            jnp.maximum(peak, jnp.max(jnp.abs(x.astype(jnp.float32)), axis=(0, 2)))
            for peak, x in zip(pool, (k, v), strict=True)
        )
        return mixed, (largest[0], largest[1])


def with_kv_scales(spec: ModelSpec, trees: Sequence[Tree], meshes: Sequence[Mesh], dtype: Any) -> list[Tree]:
    """The weight trees with scales for pools of `dtype`, measured on the first mesh and the same on each."""
    name = jnp.dtype(dtype).name
    largest = HEADROOM[name] / LARGEST[name]
    found = [(rounded_up(k * largest), rounded_up(v * largest)) for k, v in peaks(spec, trees[0], meshes[0])]
    log.info("KV cache %s: scales of %d layers measured on %d tokens", name, spec.layers, TOKENS)
    placed: dict[Mesh, Tree] = {}
    for tree, mesh in zip(trees, meshes, strict=True):
        if mesh not in placed:
            placed[mesh] = _placed(tree, found, NamedSharding(mesh, PartitionSpec("tp")))
    return [placed[mesh] for mesh in meshes]


def _placed(tree: Tree, found: Sequence[Any], where: NamedSharding) -> Tree:
    layers = []
    for layer, scales in zip(tree["layers"], found, strict=True):
        k, v = (jax.device_put(scale, where) for scale in scales)
        layers.append({**layer, "attention": {**layer["attention"], "k_scale": k, "v_scale": v}})
    return {**tree, "layers": layers}


def peaks(spec: ModelSpec, tree: Tree, mesh: Mesh) -> list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    """Of each layer the largest key and the largest value of each kv head, [K] each, over fixed random tokens."""
    count = min(TOKENS, spec.max_positions)
    tokens = np.random.default_rng(0).integers(0, spec.vocab, count).astype(np.int32)
    index, one = np.arange(count, dtype=np.int32), np.full(1, count, np.int32)
    unused = np.zeros((1, 1), np.int32)
    rows = (index, np.zeros_like(index), index, np.zeros(1, np.int32), one, one, unused)
    ragged = Ragged(*map(jnp.asarray, rows))
    run = jax.jit(partial(_observed, spec=spec, attention=Observer(mesh)))
    empty = [(np.zeros(spec.pool_heads, np.float32),) * 2] * spec.layers
    seen = jax.device_get(run(tree, empty, tokens, ragged))
    return [(np.asarray(k), np.asarray(v)) for k, v in seen]


def _observed(
    weights: Tree, pools: list[Pool], tokens: jax.Array, ragged: Ragged, *, spec: ModelSpec, attention: Observer
) -> list[Pool]:
    return registry.forward(spec, weights, pools, tokens, ragged, attention=attention)[1]


def rounded_up(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """x [K] at the next of `STEPS_PER_OCTAVE` steps; a head that is all zeros gets the smallest normal number."""
    steps = np.ceil(np.log2(np.maximum(x, np.finfo(np.float32).tiny)) * STEPS_PER_OCTAVE - 1e-3)
    return np.exp2(steps / STEPS_PER_OCTAVE).astype(np.float32)
