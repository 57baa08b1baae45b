"""A mixture of experts in place of a feed-forward: a router chooses a few experts for each token.

Experts are split over the mesh axis `tp`: every shard sees all tokens, computes what its own experts add to them, and
one sum puts the shards' parts together. Letters: T tokens, E model dim, X experts, C chosen per token, F width of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxserve.models.layers import ACTIVATIONS, Array, Info, Mlp, Source, like, matrix, same, vector
from jaxserve.models.quantised import Weight, ragged_dot
from jaxserve.models.spec import ModelSpec

AT_ONCE = 512  # tokens


class Matrices(NamedTuple):
    """Arrays of some experts."""

    gate_up: Weight  # [X, E, 2 * F]
    down: Weight  # [X, F, E]
    gate_up_bias: jax.Array | None = None  # [X, 2 * F]
    down_bias: jax.Array | None = None  # [X, E]


class Moe(nnx.Module):
    """Router and experts. `leaves`: what the checkpoint calls an expert's gate, up and down."""

    def __init__(
        self,
        spec: ModelSpec,
        prefix: str,
        leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        *,
        router: str = "gate.",
        correction: str = "e_score_correction_bias",
    ) -> None:
        assert spec.moe is not None
        self.moe, self.activation = spec.moe, spec.activation
        e, x = spec.dim, spec.moe.experts
        # In float32 whatever the model's: biases of experts lie closer together than bfloat16 can tell.
        wide = Info((x,), ("choice",), (Source(prefix + correction, (x,)),), same, 0.0, dtype=jnp.dtype(jnp.float32))
        self.correction = nnx.Param(wide) if spec.moe.corrected else None
        self.router = matrix(prefix + router + "weight", e, x, ("dim", "choice"), contract=None)
        self.router_bias = vector(prefix + router + "bias", x, "choice", 0.0) if spec.moe.biased else None
        self.gate_up, self.down = self.matrices(spec, prefix + "experts.", leaves)
        self.gate_up_bias, self.down_bias = self.biases(spec, prefix + "experts.")
        shared = replace(spec, ff_dim=max(spec.moe.shared, 1))
        self.shared = Mlp(shared, prefix + "shared_experts.") if spec.moe.shared else None

    def matrices(self, spec: ModelSpec, prefix: str, leaves: tuple[str, ...]) -> tuple[nnx.Param[Info], ...]:
        """Of all experts: gate and up [X, E, 2 * F], down [X, F, E]; here from tensors of each by itself."""
        e, f, x = spec.dim, self.moe.ff_dim, self.moe.experts
        gate, up, down = leaves
        pairs = tuple(Source(f"{prefix}{i}.{leaf}.weight", (f, e)) for i in range(x) for leaf in (gate, up))
        downs = tuple(Source(f"{prefix}{i}.{down}.weight", (e, f)) for i in range(x))
        return (
            nnx.Param(Info((x, e, 2 * f), ("experts", "dim", "pack"), pairs, _pairs, contract=1)),
            nnx.Param(Info((x, f, e), ("experts", "pack", "dim"), downs, _each, contract=1)),
        )

    def biases(self, spec: ModelSpec, prefix: str) -> tuple[nnx.Param[Info] | None, ...]:
        """Of all experts: gate and up [X, 2 * F], down [X, E]; here none."""
        return None, None

    def __call__(self, x: jax.Array, mesh: Any = None) -> jax.Array:  # [T, E] -> [T, E]
        chosen, weights = self.route(x)
        biases = (self.gate_up_bias, self.down_bias)
        experts = Matrices(self.gate_up[...], self.down[...], *(None if b is None else b[...] for b in biases))
        out = self._mixed(x, chosen, weights, experts, mesh).astype(x.dtype)
        return out if self.shared is None else out + self.shared(x)

    def _mixed(self, x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Matrices, mesh: Any) -> jax.Array:
        if mesh is None or mesh.shape["tp"] == 1:
            return grouped(x, chosen, weights, experts, jnp.int32(0), gated=self.gated)

        def shard(x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Matrices) -> jax.Array:
            first = lax.axis_index("tp") * experts.down.shape[0]
            whole: jax.Array = lax.psum(grouped(x, chosen, weights, experts, first, gated=self.gated), "tp")
            return whole

        run = jax.shard_map(shard, mesh=mesh, in_specs=(P(), P(), P(), P("tp")), out_specs=P())
        out: jax.Array = run(x, chosen, weights, experts)
        return out

    def gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """What an expert makes of its two products, [..., F] each."""
        slope, limit = self.moe.gate_slope, self.moe.gate_limit
        if not limit:
            return ACTIVATIONS[self.activation](gate) * up
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(slope * gate) * (up + 1)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Experts of each token [T, C] int32, and their weights [T, C] float32."""
        logits = jnp.einsum("te,ex->tx", x, self.router[...], preferred_element_type=jnp.float32)
        if self.router_bias is not None:
            logits = logits + like(self.router_bias[...], logits)
        scores = jax.nn.sigmoid(logits) if self.moe.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        liked = scores if self.correction is None else scores + like(self.correction[...], scores)
        chosen = lax.top_k(self._of_best_groups(liked), self.moe.chosen)[1]
        best = jnp.take_along_axis(scores, chosen, axis=-1)
        best = best / jnp.sum(best, axis=-1, keepdims=True) if self.moe.normalised else best
        return chosen, best * self.moe.scaling if self.moe.scaling != 1.0 else best

    def _of_best_groups(self, liked: jax.Array) -> jax.Array:
        """Scores [T, X], those of groups that a token may not choose from out of reach."""
        moe = self.moe
        if moe.groups_kept == moe.groups:
            return liked
        by_group = liked.reshape(len(liked), moe.groups, -1)
        group = jnp.sum(lax.top_k(by_group, moe.group_best)[0], axis=-1)  # [T, groups]
        kept = jax.nn.one_hot(lax.top_k(group, moe.groups_kept)[1], moe.groups, dtype=bool).any(axis=1)
        return jnp.where(kept[..., None], by_group, -jnp.inf).reshape(liked.shape)


def _pairs(*parts: Array) -> Array:
    """[F, E] of gate and up, expert by expert -> [X, E, 2 * F]."""
    width, dim = parts[0].shape
    out = np.empty((len(parts) // 2, dim, 2, width), parts[0].dtype)
    for i, part in enumerate(parts):
        out[i // 2, :, i % 2] = part.T
    return out.reshape(-1, dim, 2 * width)


def _each(*parts: Array) -> Array:
    """[E, F] of every expert -> [X, F, E]."""
    return np.stack([part.T for part in parts])


def grouped(
    x: jax.Array,  # [T, E]
    chosen: jax.Array,  # [T, C] int32
    weights: jax.Array,  # [T, C] float32
    held: Matrices,  # of the experts from `first` on
    first: jax.Array,
    *,
    gated: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """What these experts add to each token, [T, E] float32. A token's sum has one order, whoever shares the step.

    Many tokens go through in parts: but for TPUs the rows of a `ragged_dot` are spread over all experts, which for the
    8,192 tokens of a prefill takes tens of gigabytes.
    """
    compute = partial(_at_once, held=held, first=first, gated=gated)
    if len(x) <= AT_ONCE or len(x) % AT_ONCE:
        return compute(x, chosen, weights)

    def in_parts(*whole: jax.Array) -> jax.Array:
        parts = [part.reshape(-1, AT_ONCE, part.shape[1]) for part in whole]
        out: jax.Array = lax.map(lambda part: compute(*part), parts)
        return out.reshape(x.shape)

    out: jax.Array = lax.platform_dependent(x, chosen, weights, tpu=compute, default=in_parts)
    return out


def _at_once(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    held: Matrices,
    first: jax.Array,
    gated: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    (experts, width, _), (tokens, count) = held.down.shape, chosen.shape
    mine = chosen.reshape(-1) - first
    mine = jnp.where((mine >= 0) & (mine < experts), mine, experts)  # [T * C]; what is not here comes last
    order = jnp.argsort(mine, stable=True)
    sizes = jnp.bincount(mine, length=experts + 1)[:experts].astype(jnp.int32)
    owner = mine[order]
    hidden = ragged_dot(x[order // count], held.gate_up, sizes, owner)  # [T * C, 2 * F]
    if held.gate_up_bias is not None:
        hidden = hidden + jnp.take(held.gate_up_bias, owner, axis=0, mode="clip")
    hidden = gated(hidden[:, :width], hidden[:, width:])
    sorted_out = ragged_dot(hidden, held.down, sizes, owner, preferred_element_type=jnp.float32)  # [T * C, E]
    if held.down_bias is not None:
        sorted_out = sorted_out + jnp.take(held.down_bias, owner, axis=0, mode="clip")
    out = jnp.zeros_like(sorted_out).at[order].set(sorted_out, unique_indices=True)
    out = jnp.where((mine < experts)[:, None], out, 0.0).reshape(tokens, count, -1)
    return jnp.einsum("tce,tc->te", out, weights, precision="highest")
