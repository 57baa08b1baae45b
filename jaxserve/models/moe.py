"""A mixture of experts in place of a feed-forward: a router chooses a few experts for each token.

Experts are split over the mesh axis `tp`: every shard sees all tokens, computes what its own experts add to them, and
one sum puts the shards' parts together. Letters: T tokens, E model dim, X experts, C chosen per token, F width of one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxserve.models.layers import ACTIVATIONS, Array, Info, Source, like, matrix, vector
from jaxserve.models.spec import ModelSpec


class Moe(nnx.Module):
    """Router and experts. `leaves`: what the checkpoint calls an expert's gate, up and down."""

    def __init__(
        self, spec: ModelSpec, prefix: str, leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> None:
        assert spec.moe is not None
        self.moe, self.activation = spec.moe, spec.activation
        e, f, x = spec.dim, spec.moe.ff_dim, spec.moe.experts
        gate, up, down = leaves
        correction = prefix + "e_score_correction_bias"
        self.correction = vector(correction, x, "choice", 0.0) if spec.moe.corrected else None
        self.router = matrix(prefix + "gate.weight", e, x, ("dim", "choice"))
        self.gate_up = nnx.Param(
            Info(
                (x, e, 2 * f),
                ("experts", "dim", "pack"),
                tuple(Source(f"{prefix}experts.{i}.{leaf}.weight", (f, e)) for i in range(x) for leaf in (gate, up)),
                _pairs,
            )
        )
        self.down = nnx.Param(
            Info(
                (x, f, e),
                ("experts", "pack", "dim"),
                tuple(Source(f"{prefix}experts.{i}.{down}.weight", (e, f)) for i in range(x)),
                _each,
            )
        )

    def __call__(self, x: jax.Array, mesh: Any = None) -> jax.Array:  # [T, E] -> [T, E]
        chosen, weights = self.route(x)
        compute = partial(grouped, activation=self.activation)
        if mesh is None or mesh.shape["tp"] == 1:
            return compute(x, chosen, weights, self.gate_up[...], self.down[...], jnp.int32(0)).astype(x.dtype)

        def shard(x: jax.Array, chosen: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> Any:
            first = lax.axis_index("tp") * gate_up.shape[0]
            return lax.psum(compute(x, chosen, weights, gate_up, down, first), "tp")

        run = jax.shard_map(shard, mesh=mesh, in_specs=(P(), P(), P(), P("tp"), P("tp")), out_specs=P())
        out: jax.Array = run(x, chosen, weights, self.gate_up[...], self.down[...])
        return out.astype(x.dtype)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Experts of each token [T, C] int32, and their weights [T, C] float32."""
        logits = jnp.einsum("te,ex->tx", x, self.router[...], preferred_element_type=jnp.float32)
        scores = jax.nn.sigmoid(logits) if self.moe.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        liked = scores if self.correction is None else scores + like(self.correction[...], scores).astype(scores.dtype)
        chosen = lax.top_k(liked, self.moe.chosen)[1]
        best = jnp.take_along_axis(scores, chosen, axis=-1)
        return chosen, best / jnp.sum(best, axis=-1, keepdims=True) if self.moe.normalised else best


def _pairs(*parts: Array) -> Array:
    """[F, E] of gate and up, expert by expert -> [X, E, 2 * F]."""
    return np.stack([np.concatenate(pair).T for pair in zip(parts[::2], parts[1::2], strict=True)])


def _each(*parts: Array) -> Array:
    """[E, F] of every expert -> [X, F, E]."""
    return np.stack([part.T for part in parts])


def grouped(
    x: jax.Array,  # [T, E]
    chosen: jax.Array,  # [T, C] int32
    weights: jax.Array,  # [T, C] float32
    gate_up: jax.Array,  # [X, E, 2 * F], of the experts from `first` on
    down: jax.Array,  # [X, F, E]
    first: jax.Array,
    *,
    activation: str,
) -> jax.Array:
    """What these experts add to each token, [T, E] float32. A token's sum has one order, whoever shares the step."""
    experts, (tokens, count), width = gate_up.shape[0], chosen.shape, down.shape[1]
    mine = chosen.reshape(-1) - first
    mine = jnp.where((mine >= 0) & (mine < experts), mine, experts)  # [T * C]; what is not here comes last
    order = jnp.argsort(mine, stable=True)
    sizes = jnp.bincount(mine, length=experts + 1)[:experts].astype(jnp.int32)
    hidden = lax.ragged_dot(x[order // count], gate_up, sizes)  # [T * C, 2 * F]
    hidden = ACTIVATIONS[activation](hidden[:, :width]) * hidden[:, width:]
    sorted_out = lax.ragged_dot(hidden, down, sizes, preferred_element_type=jnp.float32)  # [T * C, E]
    out = jnp.zeros_like(sorted_out).at[order].set(sorted_out, unique_indices=True)
    out = jnp.where((mine < experts)[:, None], out, 0.0).reshape(tokens, count, -1)
    return jnp.einsum("tce,tc->te", out, weights, precision="highest")
