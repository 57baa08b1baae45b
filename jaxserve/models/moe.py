"""Mixture-of-experts feed-forward: a router selects a few experts for each token.

Experts are split over the mesh axis `tp`. Every shard sees all tokens and computes the contribution of
its own experts, and one all-reduce adds the shards' contributions.

Letters: T tokens, E model dim, X experts, C experts per token, F width of an expert, R rows of the
grouped products (T * C with padding).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxserve.models.layers import ACTIVATIONS, Array, Info, Mlp, Source, library, matrix, same, vector
from jaxserve.models.quantized import Weight, multiplied
from jaxserve.models.spec import ModelSpec
from pallas_kernels.attention.api import Attention as Kernel
from pallas_kernels.norms import like
from pallas_kernels.ops.grouped_matmul.api import Experts


class Matrices(NamedTuple):
    """The weights of some experts."""

    gate_up: Weight  # [X, E, 2 * F]
    down: Weight  # [X, F, E]
    gate_up_bias: jax.Array | None = None  # [X, 2 * F]
    down_bias: jax.Array | None = None  # [X, E]


class Moe(nnx.Module):
    """A router and its experts. `leaves`: the checkpoint's names of an expert's gate, up and down projections."""

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
        # Always float32: biases of experts differ by less than the precision of bfloat16.
        wide = Info((x,), ("choice",), (Source(prefix + correction, (x,)),), same, 0.0, dtype=jnp.dtype(jnp.float32))
        self.correction = nnx.Param(wide) if spec.moe.corrected else None
        self.router = matrix(prefix + router + "weight", e, x, ("dim", "choice"), contract=None)
        self.router_bias = vector(prefix + router + "bias", x, "choice", 0.0) if spec.moe.biased else None
        self.gate_up, self.down = self.matrices(spec, prefix + "experts.", leaves)
        self.gate_up_bias, self.down_bias = self.biases(spec, prefix + "experts.")
        shared = replace(spec, ff_dim=max(spec.moe.shared, 1))
        self.shared = Mlp(shared, prefix + "shared_experts.") if spec.moe.shared else None

    def matrices(self, spec: ModelSpec, prefix: str, leaves: tuple[str, ...]) -> tuple[nnx.Param[Info], ...]:
        """Describe gate and up [X, E, 2 * F] and down [X, F, E] of all experts, from one tensor per expert."""
        e, f, x = spec.dim, self.moe.ff_dim, self.moe.experts
        gate, up, down = leaves
        pairs = tuple(Source(f"{prefix}{i}.{leaf}.weight", (f, e)) for i in range(x) for leaf in (gate, up))
        downs = tuple(Source(f"{prefix}{i}.{down}.weight", (e, f)) for i in range(x))
        return (
            nnx.Param(Info((x, e, 2 * f), ("experts", "dim", "pack"), pairs, _pairs, contract=1)),
            nnx.Param(Info((x, f, e), ("experts", "pack", "dim"), downs, _each, contract=1)),
        )

    def biases(self, spec: ModelSpec, prefix: str) -> tuple[nnx.Param[Info] | None, ...]:
        """Describe the biases of all experts, gate and up [X, 2 * F] and down [X, E]; by default none."""
        return None, None

    def __call__(self, x: jax.Array, kernel: Kernel) -> jax.Array:  # [T, E] -> [T, E]
        chosen, weights = self.route(x)
        biases = (self.gate_up_bias, self.down_bias)
        experts = Matrices(self.gate_up[...], self.down[...], *(None if b is None else b[...] for b in biases))
        out = self._mixed(x, chosen, weights, experts, kernel).astype(x.dtype)
        return out if self.shared is None else out + self.share(x)

    def share(self, x: jax.Array) -> jax.Array:
        """Return the contribution of the shared experts, [T, E]."""
        assert self.shared is not None
        return self.shared(x)

    def _mixed(
        self, x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Matrices, kernel: Kernel
    ) -> jax.Array:
        mesh, compute = kernel.mesh, partial(grouped, kernel=kernel.experts, gated=self.gated)
        if mesh is None or mesh.shape["tp"] == 1:
            return compute(x, chosen, weights, experts, 0)

        def shard(x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Matrices) -> jax.Array:
            first = lax.axis_index("tp") * experts.down.shape[0]
            whole: jax.Array = lax.psum(compute(x, chosen, weights, experts, first), "tp")
            return whole

        # check_vma=False, because Pallas kernels do not declare what they replicate.
        run = jax.shard_map(shard, mesh=mesh, in_specs=(P(), P(), P(), P("tp")), out_specs=P(), check_vma=False)
        out: jax.Array = run(x, chosen, weights, experts)
        return out

    def gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Apply the gate: combine an expert's gate and up products, [..., F] each."""
        slope, limit = self.moe.gate_slope, self.moe.gate_limit
        if not limit:
            return ACTIVATIONS[self.activation](gate) * up
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(slope * gate) * (up + 1)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the experts of each token, [T, C] int32, and their weights, [T, C] float32."""
        logits = jnp.einsum("te,ex->tx", x, self.router[...], preferred_element_type=jnp.float32)
        if self.router_bias is not None:
            logits = logits + like(self.router_bias[...], logits)
        scores = jax.nn.sigmoid(logits) if self.moe.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        liked = scores if self.correction is None else scores + like(self.correction[...], scores)
        chosen = lax.top_k(self._of_best_groups(liked), self.moe.chosen)[1]
        best = jnp.take_along_axis(scores, chosen, axis=-1)
        best = best / jnp.sum(best, axis=-1, keepdims=True) if self.moe.normalized else best
        return chosen, best * self.moe.scaling if self.moe.scaling != 1.0 else best

    def _of_best_groups(self, liked: jax.Array) -> jax.Array:
        """Set the scores [T, X] of experts outside a token's best groups to minus infinity."""
        moe = self.moe
        if moe.groups_kept == moe.groups:
            return liked
        by_group = liked.reshape(len(liked), moe.groups, -1)
        group = jnp.sum(lax.top_k(by_group, moe.group_best)[0], axis=-1)  # [T, groups]
        kept = jax.nn.one_hot(lax.top_k(group, moe.groups_kept)[1], moe.groups, dtype=bool).any(axis=1)
        return jnp.where(kept[..., None], by_group, -jnp.inf).reshape(liked.shape)


def _pairs(*parts: Array) -> Array:
    """Stack gate and up [F, E] of one expert after another to [X, E, 2 * F]."""
    width, dim = parts[0].shape
    if (xp := library(parts[0])) is not np:
        pairs: Array = xp.stack(parts).reshape(-1, 2, width, dim)
        return pairs.transpose(0, 3, 1, 2).reshape(-1, dim, 2 * width)
    out = np.empty((len(parts) // 2, dim, 2, width), parts[0].dtype)  # filled in place: a host holds no second copy
    for i, part in enumerate(parts):
        out[i // 2, :, i % 2] = part.T
    return out.reshape(-1, dim, 2 * width)


def _each(*parts: Array) -> Array:
    """Stack [E, F] of all experts to [X, F, E]."""
    return library(parts[0]).stack([part.T for part in parts])  # type: ignore[no-any-return]


def grouped(
    x: jax.Array,  # [T, E]
    chosen: jax.Array,  # [T, C] int32
    weights: jax.Array,  # [T, C] float32
    held: Matrices,  # of consecutive experts, beginning with `first`
    first: jax.Array | int,
    *,
    kernel: Experts,
    gated: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Return the contribution of these experts to each token, [T, E] float32.

    The order of a token's sum is fixed, so that it does not depend on the other tokens of the step.
    """
    (experts, width, _), (tokens, count) = held.down.shape, chosen.shape
    work = kernel.plan(chosen.reshape(-1) - first, experts)
    rows = x[work.source // count]
    if held.gate_up_bias is None:
        hidden = multiplied(kernel, rows, held.gate_up, work, gate=gated)  # [R, F]
    else:
        hidden = multiplied(kernel, rows, held.gate_up, work) + held.gate_up_bias[work.owner]  # [R, 2 * F]
        hidden = gated(hidden[:, :width], hidden[:, width:])
    rows = multiplied(kernel, hidden, held.down, work, jnp.float32)  # [R, E]
    if held.down_bias is not None:
        rows = rows + held.down_bias[work.owner]
    place, out = work.place.reshape(tokens, count), jnp.zeros((tokens, rows.shape[1]), jnp.float32)
    for i in range(count):  # experts of other shards have no row here and add 0
        out = out + weights[:, i, None] * rows.at[place[:, i]].get(mode="fill", fill_value=0)
    return out
